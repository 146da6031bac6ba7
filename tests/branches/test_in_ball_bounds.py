"""Bounds of attention in the unit ball against dense Jacobians, and inputs that attain them."""

import math
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from invformer.branches.in_ball import bounds as bounded
from invformer.numerics.ball import AttentionPoint, attention_point
from invformer.numerics.norms import NORMS
from tests.support.problems import (
    attend_in_ball,
    diagonal_norm,
    jacobian,
    norm_from_below,
    of_one_layer,
    plain_bias,
)

FAR = 1e9
causal = partial(plain_bias, 1, causal=True)


def point(x: Tensor, w_qkv: Tensor, tau: Tensor, bias: Tensor, strict: bool) -> AttentionPoint:
    q, k, v = x @ w_qkv
    if strict:
        k, v = (torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1) for z in (k, v))
    return attention_point(q, k, v, tau, bias)


def local_bounds(
    x: Tensor, w_qkv: Tensor, tau: Tensor, g: Tensor, bias: Tensor, strict: bool
) -> dict[str, float]:
    at = point(x, w_qkv, tau, bias, strict)
    bound = partial(bounded.local_bound, at, w_qkv, g, strictly_causal=strict)
    return {
        "token_max": bound("token_max").item(),
        "frobenius": bound("frobenius", tight=True).item(),
        "fast": bound("frobenius").item(),
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_no_dense_jacobian_exceeds_a_bound(strict: bool, scale: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        w_qkv, g = torch.randn(3, 2, 5, 3), torch.randn(2, 3, 5)
        tau, x, bias = 4 * torch.rand(2), scale * torch.randn(6, 5), causal(6)
        jac = jacobian(lambda z, a=(w_qkv, tau, g, bias, strict): attend_in_ball(z, *a), x)
        found = local_bounds(x, w_qkv, tau, g, bias, strict)
        for norm in NORMS:
            certified = of_one_layer(bounded.lipschitz_bounds, w_qkv, tau, g, norm, num_tokens=6)
            assert norm_from_below(jac, norm) <= min(found.get(norm, math.inf), certified)
        assert found["frobenius"] <= found["fast"] * (1 + 1e-9)
        own = of_one_layer(bounded.causal_bounds, w_qkv, tau, g, [1.0, 2.0], strict)
        assert diagonal_norm(jac) <= own <= of_one_layer(bounded.token_max_bounds, w_qkv, tau, g)


def test_blocks_of_strictly_causal_attention_are_bounded_one_by_one() -> None:
    x, w_qkv, tau, bias = torch.randn(6, 5), torch.randn(3, 1, 5, 4), torch.tensor([2.0]), causal(6)
    jac = jacobian(lambda z: attend_in_ball(z, w_qkv, tau, torch.eye(4)[None], bias, True), x)
    bound = bounded.comparison(point(x, w_qkv, tau, bias, True), w_qkv, True)[0]
    assert (torch.linalg.matrix_norm(jac.transpose(1, 2), 2) <= bound).all()
    assert (bound.triu(1) == 0).all()


@pytest.mark.parametrize(
    ("norm", "tight"), [("token_max", False), ("frobenius", False), ("frobenius", True)]
)
def test_heads_that_are_alike_add_up(norm: Literal["token_max", "frobenius"], tight: bool) -> None:
    x, w_qkv, g, bias = torch.randn(6, 5), torch.randn(3, 1, 5, 4), torch.randn(1, 4, 5), causal(6)

    def bound(heads: int) -> Tensor:
        w, outputs = w_qkv.expand(-1, heads, -1, -1), g.expand(heads, -1, -1)
        at = point(x, w, torch.full((heads,), 2.0), bias, False)
        return bounded.local_bound(at, w, outputs, norm, tight=tight)

    torch.testing.assert_close(bound(9), 9 * bound(1), rtol=1e-6, atol=0)


def saturated(tau: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two tokens, opposite in a channel that queries and values read: the key moves the own row.

    W_Q = W_V = ε in channel 1, W_K = 1 in channel 2; the first token's bias makes P_22 = 1/2.
    """
    epsilon = 1e-3
    w_qkv = torch.zeros(3, 1, 2, 1)
    w_qkv[0, 0, 0] = w_qkv[2, 0, 0] = epsilon
    w_qkv[1, 0, 1] = 1
    x = torch.tensor([[-FAR / epsilon, 0.0], [FAR / epsilon, 0.0]])
    return x, w_qkv, torch.tensor([tau]), torch.tensor([[[1.0, 0.0]]]), causal(2)


def test_the_key_term_of_the_diagonal_bound_is_attained() -> None:
    """True 2.000, certified 2.000: half the key term, τ W_K/4, is refuted."""
    x, w_qkv, tau, g, bias = saturated(tau=4.0)
    measured = diagonal_norm(jacobian(lambda z: attend_in_ball(z, w_qkv, tau, g, bias, False), x))
    bound = of_one_layer(bounded.causal_bounds, w_qkv, tau, g, [1.0])
    assert measured == pytest.approx(2, rel=1e-6)
    assert measured <= bound <= measured * (1 + 1e-4)


def test_strictly_causal_the_query_term_alone_is_attained() -> None:
    """A row split between the null token and a saturated one, τ = 4: Cov(v, k) = 1/4, gain 1."""
    w_qkv, one = torch.ones(3, 1, 1, 1), torch.ones(1, 1, 1)
    x, tau, bias = torch.tensor([[FAR], [0.0]]), torch.tensor([4.0]), causal(2)
    measured = diagonal_norm(jacobian(lambda z: attend_in_ball(z, w_qkv, tau, one, bias, True), x))
    assert measured == pytest.approx(1, rel=1e-6)
    assert measured <= of_one_layer(bounded.causal_bounds, w_qkv, tau, one, [1.0], True)
    # Two opposite saturated tokens before it: Cov(v, k) = 1, gain τ.
    x, bias = torch.tensor([[FAR], [-FAR], [0.0]]), causal(3)
    bias[0, :, 0] = torch.tensor([0.0, 0.0, -math.inf])
    measured = diagonal_norm(jacobian(lambda z: attend_in_ball(z, w_qkv, tau, one, bias, True), x))
    bound = of_one_layer(bounded.causal_bounds, w_qkv, tau, one, [1.0], True)
    assert measured == pytest.approx(4, rel=1e-6)
    assert measured <= bound <= measured * (1 + 1e-4)


def test_strictly_causal_local_bounds_count_a_token_in_the_column_it_moves() -> None:
    """One token moves its own row by its query and a later one by its value: √2 in frobenius."""
    w_qkv, one = torch.ones(3, 1, 1, 1), torch.ones(1, 1, 1)
    x, tau = torch.tensor([[FAR], [0.0], [0.0]]), torch.tensor([4.0])
    bias = causal(3)
    bias[0, 2, :2] = -60  # the last row sees the second token alone
    jac = jacobian(lambda z: attend_in_ball(z, w_qkv, tau, one, bias, True), x)
    measured = norm_from_below(jac, "frobenius")
    assert measured == pytest.approx(math.sqrt(2), rel=1e-6)
    bound = local_bounds(x, w_qkv, tau, one, bias, True)["frobenius"]
    assert measured <= bound <= measured * (1 + 1e-4)
