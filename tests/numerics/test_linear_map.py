"""Jacobians as products, and log|det(I + J)| of causal maps, held against dense matrices."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.linear_map import linearise
from invformer.numerics.log_det import causal_log_det, estimate_log_det
from tests.numerics.contractions import orthogonal
from tests.support.problems import dense_jacobian

N, D = 4, 3


def mixing_map(x: Tensor) -> Tensor:
    """Not linear, and every token reacts to every other of its own sample."""
    return torch.tanh(x) * x.cumsum(-2).sin() + x.square().mean(-2, keepdim=True)


def test_products_agree_with_the_dense_jacobian_sample_by_sample() -> None:
    x = torch.randn(2, 3, N, D)
    dx, g = torch.randn_like(x), torch.randn_like(x)
    jacobian = linearise(mixing_map, x)
    pushed, pulled = jacobian.jvp(dx).flatten(2), jacobian.vjp(g).flatten(2)
    for i, j in product(range(2), range(3)):
        dense = dense_jacobian(mixing_map, x[i, j])
        torch.testing.assert_close(pushed[i, j], dense @ dx[i, j].flatten())
        torch.testing.assert_close(pulled[i, j], dense.mT @ g[i, j].flatten())


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


def causal_map(w: Tensor, heads: int = 2) -> Callable[[Tensor], Tensor]:
    """tanh((x + attention(x)) W) with tied L2 attention: causal, and tokens do mix."""
    d = len(w) // heads
    w_q = 0.8 * orthogonal(heads, len(w), len(w))[..., :d]
    g = 0.4 * orthogonal(heads, len(w), len(w))[:, :d]

    def f(x: Tensor) -> Tensor:
        hidden = torch.full((1, x.shape[-2], x.shape[-2]), -math.inf).triu(1)
        attended = (l2_attention(x.unsqueeze(-3) @ w_q, hidden) @ g).sum(-3)
        return torch.tanh((x + attended) @ w)

    return f


def test_a_causal_log_det_is_the_dense_one_in_every_grad_mode() -> None:
    f, x = causal_map(0.5 * orthogonal(6, 6)), torch.randn(6, 7, 6)
    exact = torch.stack([(torch.eye(42) + dense_jacobian(f, sample)).logdet() for sample in x])
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            found = causal_log_det(f, x.view(2, 3, 7, 6).clone().requires_grad_()).flatten()
            assert not found.requires_grad
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_a_flow_learns_from_the_gradient_of_the_dense_log_det() -> None:
    w = (0.5 * orthogonal(6, 6)).requires_grad_()
    f, x = causal_map(w), torch.randn(3, 6, requires_grad=True)
    found = torch.autograd.grad(causal_log_det(f, x), (x, w))
    dense = torch.eye(18) + dense_jacobian(f, x)
    torch.testing.assert_close(found, torch.autograd.grad(dense.logdet(), (x, w)))


def test_a_map_that_sees_the_future_is_refused() -> None:
    mixing = torch.full((5, 5), 0.1)
    with pytest.raises(ValueError, match="not causal: token 0 depends on later ones"):
        causal_log_det(lambda x: mixing @ x, torch.randn(2, 5, 3))


C = 0.6  # of the map below: ‖w‖₂ = C, slopes of tanh at most one


def contraction(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A map that mixes all entries of a sample."""
    return lambda x: torch.tanh(x.flatten(-2) @ w).view(x.shape)


@pytest.mark.parametrize("num_terms", [None, 3])
def test_an_estimated_log_det_and_its_gradients_have_the_stated_mean(num_terms: int | None) -> None:
    w = (C * orthogonal(6, 6)).requires_grad_()
    x = torch.randn(3, 2, requires_grad=True)
    dense = torch.eye(6) + dense_jacobian(contraction(w), x)
    exact, gradients = dense.logdet(), torch.autograd.grad(dense.logdet(), (x, w))
    copies = x.detach().expand(2_500, 3, 2).clone().requires_grad_()
    probes = {"num_probes": 4, "generator": torch.Generator().manual_seed(1)}
    cut = {"lipschitz_bound": C, "num_terms": num_terms}
    found = estimate_log_det(contraction(w), copies, **cut, **probes)
    of_x, of_w = torch.autograd.grad(found.value.mean(), (copies, w))
    three_errors = 3 * found.value.std().item() / 50 + 1e-12
    assert abs(found.value.mean() - exact) <= three_errors + found.tail
    if num_terms is None:
        assert found.tail == 0
        for mean, wanted in zip((of_x.sum(0), of_w), gradients, strict=True):
            torch.testing.assert_close(mean, wanted, rtol=0, atol=0.05)
    spread = found.value.std() / found.standard_error.square().mean().sqrt()
    assert 0.5 < spread < 2


def test_the_tail_of_a_fixed_cut_bounds_its_bias() -> None:
    w, x = C * orthogonal(6, 6), torch.zeros(3, 2)  # at zero J = wᵀ, tr(Jᵏ) is known
    exact = (torch.eye(6) + w).logdet()
    for n in (1, 2, 5, 9):
        powers = [torch.linalg.matrix_power(w, k).trace() / k for k in range(1, n + 1)]
        cut = sum(p if k % 2 == 0 else -p for k, p in enumerate(powers))
        tail = estimate_log_det(contraction(w), x, lipschitz_bound=C, num_terms=n).tail
        assert abs(cut - exact) <= tail <= 1.001 * 6 * C ** (n + 1) / ((n + 1) * (1 - C))
