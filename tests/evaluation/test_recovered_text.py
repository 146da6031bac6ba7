"""Damage to states, and what is shown of a recovered text."""

import torch

from invformer.evaluation.recovered_text import as_characters, perturb


def test_states_are_rounded_to_the_bits_asked_for() -> None:
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert perturb(z, 0.0, 2, 0).unique().numel() == 4
    assert torch.equal(perturb(z, 0.0, None, 0), z)
    noise = perturb(z, 0.5, None, 0) - z
    assert abs(noise.std() / z.square().mean().sqrt() - 0.5) < 0.05


def test_bytes_are_shown_as_the_characters_that_they_are() -> None:
    symbols = "Hé 🦊".encode().decode("latin-1")
    proven = (True, True, False, True, True, True, True, True)
    assert as_characters(symbols, proven) == ("Hé 🦊", (True, False, True, True))
    assert as_characters("\xf0\x9f", (True, False)) == ("\xf0\x9f", (True, False))
