"""Weights in few bits: their levels, and that a file gives back the same matrices."""

import pytest
import torch

from invformer.errors import ConfigurationError
from invformer.runs.packed import packed, unpacked
from invformer.trained.quantised import quantised, rounded
from tests.support.builders import scaled_model, trained_a_little


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_channel_has_a_few_evenly_spaced_levels_and_a_small_error(bits: int) -> None:
    weight = torch.randn(3, 40, 5)
    found = rounded(weight, bits, input_dim=-2).value()
    for column in found.transpose(-2, -1).flatten(0, 1):
        steps = column.unique().diff()
        assert len(column.unique()) <= 2**bits - 1
        assert torch.allclose(steps / steps.min(), (steps / steps.min()).round(), atol=1e-3)
    assert (found - weight).square().mean() < 4.0 ** (2 - bits) * weight.square().mean()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = torch.cat([torch.zeros(1, 6), torch.randn(1, 6)])
    assert torch.equal(rounded(weight, 4, input_dim=-1).value()[0], torch.zeros(6))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_stored_matrices_come_back_to_the_bit_and_are_small(bits: int) -> None:
    model, matrices = quantised(trained_a_little(scaled_model()).float(), bits)
    weights, stored = model.state_dict(), packed(matrices)
    stored |= {name: weight for name, weight in weights.items() if name not in matrices}
    for name, weight in unpacked(stored, weights, bits).items():
        assert torch.equal(weight, weights[name])
    for name, matrix in matrices.items():
        size = stored[name + ".integers"].numel()
        assert matrix.integers.numel() * bits <= 8 * size < matrix.integers.numel() * bits + 8


def test_more_bits_than_an_integer_holds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bits: 9 is not in \[2, 8\]"):
        quantised(scaled_model(), 9)
