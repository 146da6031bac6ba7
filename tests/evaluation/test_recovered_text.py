"""Damage to states, and what is shown of a recovered text."""

from functools import partial

import torch

from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.recovered_text import perturb, readable


def test_states_are_rounded_to_the_bits_asked_for() -> None:
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert perturb(z, 0.0, 2, 0)[0].unique().numel() == 4
    assert torch.equal(perturb(z, 0.0, None, 0)[0], z)
    assert torch.equal(perturb(torch.ones(2, 2), 0.0, 2, 0)[0], torch.ones(2, 2))
    noise = perturb(z, 0.5, None, 0)[0] - z
    assert abs(noise.std() / z.square().mean().sqrt() - 0.5) < 0.05


def test_levels_beyond_half_precision_move_its_states_by_at_most_half_a_level() -> None:
    z = torch.randn(50, 8, dtype=torch.float16)
    level = (z.max() - z.min()).item() / (2**16 - 1)
    assert (perturb(z, 0.0, 16, 0)[0] - z).abs().max() <= 0.51 * level


def test_how_far_an_entry_may_be_off_is_known_after_rounding_and_not_after_noise() -> None:
    z = torch.randn(50, 8)
    rounded, within = perturb(z, 0.0, 3, 0)
    assert within is not None
    assert (rounded - z).abs().max() <= within <= 0.51 * (z.max() - z.min()) / 7
    assert perturb(z, 0.5, 3, 0)[1] is None
    assert perturb(z, 0.0, None, 0)[1] is None


def test_bytes_are_shown_as_the_characters_that_they_are() -> None:
    symbols = "Hé 🦊".encode().decode("latin-1")
    proven = (True, True, False, True, True, True, True, True)
    shown = partial(readable, Vocabulary.of_bytes())
    assert shown(symbols, symbols, proven) == ("Hé 🦊", "Hé 🦊", (True, False, True, True))
    assert shown(None, symbols, proven) == (None, "Hé 🦊", (True, False, True, True))
    for text, recovered in (("ab", "aé"), (None, "\xf0\x9f"), (None, "a\ufffd")):
        assert shown(text, recovered, (True, False)) == (text, recovered, (True, False))
