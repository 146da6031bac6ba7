"""Layers of zeros, and inverses that fail, may take no step or have no tokens: of every branch."""

import math
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import nn

from invformer.nn import (
    BoundedAttention,
    ContractiveFeedForward,
    ContractiveL2Attention,
    DiagonalScaling,
    InvertibleBlock,
    InvertibleResidual,
    InvertibleStack,
    PaperContractiveL2Attention,
    RelativePositionBias,
)
from invformer.numerics.fixed_point_solution import InversionStatus
from tests.branches.position_attention import PositionAttention

WIDTH, TOKENS, TARGET = 8, 6, 0.5
FORMATS = [torch.float32, torch.float64]


def branches() -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """One of every kind, and the constant to invert it by."""
    see, causal = RelativePositionBias(2, TOKENS), {"kind": "causal"}
    yield ContractiveL2Attention(WIDTH, 2, see, TARGET), {}
    yield ContractiveL2Attention(WIDTH, 2, see, TARGET, "causal"), causal
    yield BoundedAttention(WIDTH, 2, 3, see, TARGET), {}
    yield BoundedAttention(WIDTH, 2, 3, see, TARGET, "causal"), causal
    yield BoundedAttention(WIDTH, 2, 3, see, TARGET, "causal", strictly_causal=True), causal
    yield ContractiveFeedForward(WIDTH, 16, TARGET), {}
    yield ContractiveFeedForward(WIDTH, 16, TARGET, kernel=3), causal
    yield ContractiveFeedForward(WIDTH, 16, TARGET, norm="entry_max"), {"norm": "entry_max"}
    yield PaperContractiveL2Attention(WIDTH, 2, see, TARGET), {"norm": "entry_max"}
    paper = PaperContractiveL2Attention(WIDTH, 2, see, TARGET, "kim_frobenius")
    yield paper, {"norm": "frobenius"}
    yield PositionAttention(WIDTH, see, TARGET), {}


L2, BOUNDED, FEED_FORWARD = 0, 2, 5
every_branch = pytest.mark.parametrize("index", range(len(list(branches()))))


def layer_of(
    index: int, scaled: bool, dtype: torch.dtype, radius: float | None = None
) -> tuple[Any, dict[str, Any]]:
    branch, how = list(branches())[index]
    scaling = DiagonalScaling(WIDTH) if scaled else None
    return InvertibleResidual(branch, scaling, radius).to(dtype), how  # type: ignore


@pytest.mark.parametrize("dtype", FORMATS)
@every_branch
def test_matrices_of_zeros_give_zeros_and_finite_gradients(index: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, TOKENS, WIDTH).to(dtype)
    names = [n for n, _ in layer_of(index, True, dtype)[0].named_parameters() if "weight" in n]
    for zero in chain.from_iterable(combinations(names, r + 1) for r in range(len(names))):
        layer, _ = layer_of(index, True, dtype)
        with torch.no_grad():
            for name in zero:
                layer.get_parameter(name).zero_()
        y = layer(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert len(zero) < len(names) or torch.equal(y, x)
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@every_branch
def test_an_inverse_that_fails_has_no_bound_and_one_without_steps_takes_none(
    index: int, dtype: torch.dtype, scaled: bool
) -> None:
    layer, how = layer_of(index, scaled, dtype)
    x = torch.randn(3, TOKENS, WIDTH).to(dtype)
    y = layer(x).detach()
    y[1, 3, 2] = math.nan
    found = layer.inverse(y, throw=False, **how)
    converged, failed = InversionStatus.CONVERGED, InversionStatus.NONFINITE
    assert found.status.tolist() == [converged, failed, converged]
    assert found.error_bound[1] == math.inf
    assert not found.error_bound.isnan().any()
    still, short = (layer.inverse(y, throw=False, max_steps=n, **how) for n in (0, 1))
    assert still.status.tolist() == [InversionStatus.MAX_STEPS, failed, InversionStatus.MAX_STEPS]
    for one in (still, short):
        assert (one.error_bound[~one.converged] == math.inf).all()
    assert not still.num_steps.any()
    torch.testing.assert_close(still.value, y, equal_nan=True)


@pytest.mark.parametrize("scaled", [False, True])
@every_branch
def test_what_cannot_be_inverted_is_refused_in_one_line(index: int, scaled: bool) -> None:
    layer, how = layer_of(index, scaled, torch.float32)
    block = InvertibleBlock(layer.branch, ContractiveFeedForward(WIDTH, 8, TARGET), WIDTH)
    stack = InvertibleStack([block], TOKENS, **how).to(torch.float32)
    for inverse in (lambda y: layer.inverse(y, **how), stack.inverse):
        for shape in ((2, 0, WIDTH), (0, TOKENS, WIDTH)):
            with pytest.raises(ValueError, match=r"y must be .* not empty, got .*float32 \([20], "):
                inverse(torch.zeros(shape, dtype=torch.float32))
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            with pytest.raises(ValueError, match=f"y is in {dtype}, the weights .*float32: conv"):
                inverse(torch.zeros(2, TOKENS, WIDTH, dtype=dtype))
