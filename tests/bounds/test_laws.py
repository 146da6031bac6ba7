"""Laws that a bound which is too small breaks."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from invformer.bounds import bounded, local
from invformer.numerics import l2_attention
from invformer.numerics.ball import AttentionPoint, attention_point

HEADS, TOKENS, WIDTH, D_HEAD = 3, 6, 5, 4


def test_blocks_of_strictly_causal_attention_are_bounded_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    w_qkv = torch.randn(3, 1, WIDTH, D_HEAD, generator=generator)
    x, tau = torch.randn(TOKENS, WIDTH, generator=generator), torch.tensor([2.0])
    bias = torch.zeros(1, TOKENS, TOKENS).masked_fill(
        torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf
    )

    def delayed(z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1)

    def point(x: Tensor) -> AttentionPoint:
        q, k, v = x @ w_qkv
        return attention_point(q, delayed(k), delayed(v), tau, bias)

    def output(x: Tensor) -> Tensor:
        at = point(x)
        return (at.p @ at.v)[0]

    jacobian = torch.autograd.functional.jacobian(output, x)  # (tokens, d, tokens, width)
    blocks = torch.linalg.matrix_norm(jacobian.transpose(1, 2), 2)
    bound = bounded.comparison(point(x), w_qkv, True)[0]
    assert (blocks <= bound).all()
    assert (bound.triu(1) == 0).all()


def l2_bound(name: str) -> Callable[[int], Tensor]:
    """A bound of tied L2 attention for so many identical heads."""

    def bound(heads: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = 2 * torch.randn(1, TOKENS, WIDTH, generator=generator)
        w = torch.randn(1, WIDTH, D_HEAD, generator=generator).expand(heads, -1, -1)
        g = torch.randn(1, D_HEAD, WIDTH, generator=generator).expand(heads, -1, -1)
        q = x[:, None] @ w
        p = l2_attention.attention_weights(q)
        return getattr(local, name)(q, p, w, g)

    return bound


def bounded_bound(norm: str, **options: bool) -> Callable[[int], Tensor]:
    """The same of attention in the unit ball."""

    def bound(heads: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, TOKENS, WIDTH, generator=generator)
        w = torch.randn(3, 1, WIDTH, D_HEAD, generator=generator).expand(-1, heads, -1, -1)
        g = torch.randn(1, D_HEAD, WIDTH, generator=generator).expand(heads, -1, -1)
        bias = torch.zeros(1, TOKENS, TOKENS)
        tau = torch.full((heads,), 2.0)
        at = attention_point(*(x[:, None] @ w[:, None]), tau, bias)
        return bounded.local_bound(at, w, g, norm, **options)

    return bound


BOUNDS = {
    name: l2_bound(name)
    for name in (
        "token_max_local_bound",
        "fast_local_bound",
        "tight_local_bound",
        "comparison_local_bound",
    )
} | {
    "ball, token_max": bounded_bound("token_max"),
    "ball, frobenius": bounded_bound("frobenius"),
    "ball, frobenius, tight": bounded_bound("frobenius", tight=True),
}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_heads_that_are_alike_add_up(bound: Callable[[int], Tensor]) -> None:
    """f of H equal heads is H times that of one."""
    assert torch.allclose(bound(9), 9 * bound(1), rtol=1e-6)
