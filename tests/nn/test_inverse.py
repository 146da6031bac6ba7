"""Gradients through inverses, held against dense solves and finite differences."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from invformer.numerics.fixed_point_solution import FixedPointError
from invformer.numerics.norms import NORMS, Norm, dual_norm, vector_norm
from invformer.numerics.transposed import solve_transposed
from tests.nn.test_edges import BOUNDED, FEED_FORWARD, L2, TOKENS, WIDTH, every_branch, layer_of
from tests.support.builders import contractive_model
from tests.support.problems import dense_jacobian


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
