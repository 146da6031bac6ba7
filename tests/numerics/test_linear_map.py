"""Jacobians as products: against dense Jacobians, in every grad mode."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from invformer.numerics.linear_map import linearise
from tests.support.problems import dense_jacobian

N, D = 4, 3


def mixing_map(x: Tensor) -> Tensor:
    """Not linear, and every token reacts to every other of its own sample."""
    return torch.tanh(x) * x.cumsum(-2).sin() + x.square().mean(-2, keepdim=True)


def test_products_agree_with_the_dense_jacobian_sample_by_sample() -> None:
    x = torch.randn(2, 3, N, D)
    dx, g = torch.randn_like(x), torch.randn_like(x)
    jacobian = linearise(mixing_map, x)
    pushed, pulled = jacobian.jvp(dx), jacobian.vjp(g)
    for i in range(2):
        for j in range(3):
            dense = dense_jacobian(mixing_map, x[i, j])
            expected = (dense @ dx[i, j].flatten()).view(N, D)
            torch.testing.assert_close(pushed[i, j], expected)
            expected = (dense.mT @ g[i, j].flatten()).view(N, D)
            torch.testing.assert_close(pulled[i, j], expected)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_linearising_works_in_every_grad_mode_and_leaves_no_graph(mode) -> None:
    layer = nn.Linear(D, D)
    with mode():
        x, dx, g = torch.randn(3, 2, N, D).unbind(0)
        jacobian = linearise(lambda z: torch.tanh(layer(z)), x)
        pushed, pulled = jacobian.jvp(dx), jacobian.vjp(g)
        torch.testing.assert_close((pushed * g).sum(), (pulled * dx).sum())
        slope = 1 - torch.tanh(layer(x)).square()
        torch.testing.assert_close(pushed, slope * (dx @ layer.weight.mT))
    assert not pushed.requires_grad
    assert not pulled.requires_grad
    assert layer.weight.grad is None
