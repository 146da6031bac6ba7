"""Inverses of every branch: zeros, failures, no step, no token; gradients against dense solves."""

import copy
import math
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from invformer.numerics.fixed_point_solution import FixedPointError, InversionStatus
from invformer.numerics.norms import NORMS, Norm, dual_norm, vector_norm
from invformer.numerics.transposed import solve_transposed
from tests.branches.position_attention import PositionAttention
from tests.support.builders import contractive_model
from tests.support.problems import dense_jacobian

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


def moved_layer(index: int, scaled: bool = False, radius: float | None = None) -> tuple[Any, Any]:
    """A residual layer with nothing at its start value, and the constant to invert it by."""
    layer, how = layer_of(index, scaled, torch.float64, radius)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer, how


def by_dense_solves(layer: Any, x: Tensor, v: Tensor) -> list[Tensor]:
    """w from (∂y/∂x)ᵀ w = v with dense Jacobians, and −(∂y/∂θ)ᵀ w of every parameter."""
    dense = [dense_jacobian(lambda t: layer(t[None])[0], sample).detach() for sample in x]
    w = torch.linalg.solve(torch.stack(dense).mT, v.flatten(1).unsqueeze(-1)).view_as(v)
    own = [p for p in layer.parameters() if p.requires_grad]
    of_own = torch.autograd.grad(layer(x), own, -w, allow_unused=True, materialize_grads=True)
    return [w, *of_own]


def implicit(layer: Any, y: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """The same by the inverse's own gradients."""
    y = y.detach().requires_grad_()
    own = [p for p in layer.parameters() if p.requires_grad]
    value = layer.inverse(y, **options).value
    return list(torch.autograd.grad(value, [y, *own], v, allow_unused=True, materialize_grads=True))


@every_branch
@pytest.mark.parametrize(("scaled", "radius"), [(False, None), (True, None), (True, 1.5)])
def test_gradients_of_a_layers_inverse_are_those_of_dense_solves(
    index: int, scaled: bool, radius: float | None
) -> None:
    layer, how = moved_layer(index, scaled, radius)
    if how.get("norm") == "entry_max":  # in which no bound is known with a radius
        layer.input_radius = None
    x, v = torch.randn(2, 3, TOKENS, WIDTH).unbind()
    found = implicit(layer, layer(x), v, rtol=1e-13, **how)
    torch.testing.assert_close(found, by_dense_solves(layer, x, v), rtol=1e-9, atol=1e-9)


def test_gradients_of_a_stack_are_those_of_dense_solves() -> None:
    stack = contractive_model(0.7, bounded=True).double().stack
    x, v = torch.randn(2, 2, TOKENS, 12).unbind()
    for whole in (stack, contractive_model(0.6, scaled=True).double().stack):
        found = implicit(whole, whole(x), v, rtol=1e-13)
        torch.testing.assert_close(found, by_dense_solves(whole, x, v), rtol=1e-8, atol=1e-8)


def test_an_inverse_passes_gradcheck_and_refuses_second_derivatives() -> None:
    layer, _ = moved_layer(BOUNDED, scaled=True)
    y = layer(torch.randn(1, 3, WIDTH)).detach().requires_grad_()

    def inverse(y: Tensor) -> Tensor:
        return layer.inverse(y, rtol=1e-13).value

    assert torch.autograd.gradcheck(inverse, y)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(inverse(y).sum(), y, create_graph=True)


def test_without_gradients_the_inverse_is_the_same_to_the_bit() -> None:
    stack = contractive_model(0.7).stack
    z = stack(torch.randn(2, TOKENS, 12)).detach()
    with torch.no_grad():
        plain = stack.inverse(z)
    recorded = stack.inverse(z)
    assert recorded.value.requires_grad
    assert not plain.value.requires_grad
    assert torch.equal(plain.value, recorded.value)
    assert torch.equal(plain.error_bound, recorded.error_bound)
    frozen = copy.deepcopy(stack).requires_grad_(False)
    assert not frozen.inverse(z).value.requires_grad


def test_memory_for_the_backward_pass_does_not_grow_with_steps() -> None:
    layer, _ = moved_layer(FEED_FORWARD)
    y, weights, found = layer(torch.randn(2, TOKENS, WIDTH)).detach(), layer.weights(), {}
    for rtol in (1e-2, 1e-12):
        kept: list[int] = []
        hooks = lambda x, kept=kept: kept.append(x.nbytes) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(hooks, lambda x: x):
            solution = layer.inverse(y, weights, rtol=rtol)
        found[int(solution.num_steps.max())] = sum(kept)
    few, many = found
    assert many > 3 * few
    assert 0 < found[many] == found[few]


def test_a_backward_solve_that_does_not_converge_raises_or_warns() -> None:
    layer, _ = moved_layer(L2)
    y = layer(torch.randn(2, TOKENS, WIDTH)).detach().requires_grad_()
    with pytest.warns(UserWarning, match="wrong gradients: 2 of 2 samples were not inverted"):
        layer.inverse(y, max_steps=1, throw=False).value.sum().backward()
    value = layer.inverse(y).value
    with pytest.raises(FixedPointError, match="gradients of samples were not found"):
        value.backward(torch.full_like(value, torch.nan))


@pytest.mark.parametrize("norm", NORMS)
def test_the_transpose_contracts_in_the_dual_norm(norm: Norm) -> None:
    x, z = torch.randn(2, 500, 3, 4).unbind()
    assert ((x * z).sum((-2, -1)) <= vector_norm(x, norm) * dual_norm(z, norm) * (1 + 1e-12)).all()
    # The constant of J in a norm is that of its transpose in the dual one.
    attained = torch.stack([vector_norm(x / vector_norm(x, norm)[:, None, None], norm)])
    torch.testing.assert_close(attained, torch.ones_like(attained))
    v = torch.randn(5, 3, 4)
    mixing = 0.5 * torch.linalg.qr(torch.randn(12, 12)).Q
    pull_back = lambda w: (w.flatten(1) @ mixing).view_as(w)  # noqa: E731
    c = {"frobenius": 0.5}.get(norm, 0.95)
    found = solve_transposed(pull_back, v, lipschitz_bound=c, norm=norm, kind="causal")
    torch.testing.assert_close(found.value + pull_back(found.value), v, rtol=1e-9, atol=1e-9)
    alone = solve_transposed(pull_back, v[:1], lipschitz_bound=c, norm=norm, kind="causal")
    torch.testing.assert_close(alone.value, found.value[:1], rtol=1e-12, atol=1e-12)
