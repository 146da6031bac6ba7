"""Damage to states, and the file that they are written to."""

import os
from pathlib import Path

import pytest
import torch

from invformer.errors import StorageError
from invformer.trained.states import perturb, write_states


def test_states_are_rounded_to_the_bits_asked_for() -> None:
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert perturb(z, 0.0, 2, 0)[0].unique().numel() == 4
    assert torch.equal(perturb(z, 0.0, None, 0)[0], z)
    assert torch.equal(perturb(torch.ones(2, 2), 0.0, 2, 0)[0], torch.ones(2, 2))
    noise = perturb(z, 0.5, None, 0)[0] - z
    assert torch.allclose(noise.norm(dim=-1), 0.5 * z.square().sum(-1).mean().sqrt())


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_has_no_direction_of_an_embedding_that_was_drawn_by_the_same_seed(seed: int) -> None:
    torch.manual_seed(seed)
    embedding = torch.nn.Embedding(20, 64).weight.detach()
    noise = perturb(torch.ones(20, 64), 1.0, None, seed)[0] - 1
    assert torch.cosine_similarity(noise, embedding).abs().max() < 0.7


def test_levels_beyond_half_precision_move_its_states_by_at_most_half_a_level() -> None:
    z = torch.randn(50, 8, dtype=torch.float16)
    level = (z.max() - z.min()).item() / (2**16 - 1)
    assert (perturb(z, 0.0, 16, 0)[0] - z).abs().max() <= 0.51 * level


@pytest.mark.parametrize(
    ("noise", "bits"), [(0.0, 3), (0.5, None), (0.5, 3), (1e6, None), (0.0, None)]
)
def test_it_is_known_how_far_damaged_states_may_be_off(noise: float, bits: int | None) -> None:
    z = torch.randn(50, 8)
    changed, known = perturb(z, noise, bits, 0)
    away = changed - z
    sizes = {"entries_within": away.abs().max(), "states_within": away.norm(dim=-1).max()}
    names = {(0.0, 3): ["entries_within"], (0.0, None): []}
    assert list(known) == names.get((noise, bits), ["states_within"])
    for name, bound in known.items():
        assert 0.6 * bound < sizes[name] < bound


def test_states_replace_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match=r"pipe: cannot be written \(not a regular file\)"):
        write_states(torch.zeros(3, 24), str(tmp_path / "pipe"))
    assert (tmp_path / "pipe").is_fifo()
