"""log|det(I + J)| of causal maps, held against dense matrices."""

import math
from collections.abc import Callable

import pytest
import torch

from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.log_det import causal_log_det
from tests.numerics.contractions import orthogonal
from tests.support.problems import dense_jacobian


def causal_attention(heads: int = 2, width: int = 6) -> Callable[[torch.Tensor], torch.Tensor]:
    """Tied L2 attention: a causal map whose tokens do mix."""
    d = width // heads
    w_q = 0.8 * orthogonal(heads, width, width)[..., :d]
    g = 0.4 * orthogonal(heads, width, width)[:, :d]

    def f(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((1, x.shape[-2], x.shape[-2]), -math.inf).triu(1)
        return (l2_attention(x.unsqueeze(-3) @ w_q, hidden) @ g).sum(-3)

    return f


def test_a_causal_log_det_is_the_dense_one_in_every_grad_mode() -> None:
    attention, w, x = causal_attention(), 0.5 * orthogonal(6, 6), torch.randn(6, 7, 6)

    def f(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh((z + attention(z)) @ w)

    exact = torch.stack([(torch.eye(42) + dense_jacobian(f, sample)).logdet() for sample in x])
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            found = causal_log_det(f, x.view(2, 3, 7, 6).clone().requires_grad_()).flatten()
            assert not found.requires_grad
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_a_flow_learns_from_the_gradient_of_the_dense_log_det() -> None:
    attention = causal_attention()
    w = (0.5 * orthogonal(6, 6)).requires_grad_()
    x = torch.randn(3, 6, requires_grad=True)

    def f(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh((z + attention(z)) @ w)

    found = torch.autograd.grad(causal_log_det(f, x), (x, w))
    dense = torch.eye(18) + dense_jacobian(f, x)
    torch.testing.assert_close(found, torch.autograd.grad(dense.logdet(), (x, w)))


def test_a_map_that_sees_the_future_is_refused() -> None:
    mixing = torch.full((5, 5), 0.1)
    with pytest.raises(ValueError, match="not causal: token 0 depends on later ones"):
        causal_log_det(lambda x: mixing @ x, torch.randn(2, 5, 3))
