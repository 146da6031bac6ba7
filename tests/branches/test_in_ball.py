"""Attention in the unit ball: its formula, its theorem, and inputs that attain its bounds."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from invformer.branches.in_ball import bounds as bounded
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.numerics.ball import AttentionPoint, attention_point
from invformer.numerics.norms import NORMS
from tests.support.builders import mask_of, moved
from tests.support.problems import (
    attend_in_ball,
    diagonal_norm,
    jacobian,
    norm_from_below,
    of_one_layer,
    plain_bias,
)

TOKENS, WIDTH, HEADS, D_HEAD = 7, 12, 3, 5


def layer(kind: str = "bias", certificate: str = "token_max") -> BoundedAttention:
    """A float64 layer with nothing at its start value."""
    torch.manual_seed(0)
    position = mask_of(kind, HEADS, TOKENS)
    options = {"certificate": certificate, "strictly_causal": kind == "strict"}
    return moved(BoundedAttention(WIDTH, HEADS, D_HEAD, position, 0.9, **options))


def test_the_theorem_survives_an_attack_and_is_nearly_attained() -> None:
    # Gradient ascent on the gain of one row and head over inputs and bias, matrices of norm one.
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for tau in (0.5, 2.0, 8.0):
        z = torch.randn(3, 4, 3, generator=generator, requires_grad=True)
        bias = torch.zeros(4, requires_grad=True)
        optimiser = torch.optim.Adam([z, bias], lr=0.05)
        one = torch.eye(3).expand(3, 1, 3, 3)
        (constant,) = of_one_layer(bounded.head_gains, one, torch.tensor([tau]))
        for _ in range(150):
            gain = single_row_gain(z, bias, tau)
            assert gain <= constant
            worst = max(worst, gain.item() / constant)
            optimiser.zero_grad()
            (-gain).backward()
            optimiser.step()
    assert worst > 0.9


def single_row_gain(z: torch.Tensor, bias: torch.Tensor, tau: float) -> torch.Tensor:
    """A lower bound on one row's gain when query, keys and values move separately by one each.

    With an input of orthogonal parts for queries, keys and values, each moves by its own unit
    vector; the direction of the output is the best of the value term's or the key term's own.
    """
    rho = torch.rsqrt(1 + z.square().sum(-1, keepdim=True))
    (q, k, v), (rho_q, rho_k, rho_v) = z * rho, rho
    q, rho_q = q[0], rho_q[0]
    p = (tau * k @ q + bias).softmax(-1)
    apart = v - p @ v
    into = lambda u, r, w: r * (w - u * (u * w).sum(-1, keepdim=True))  # noqa: E731
    covariance = (p[:, None] * apart).T @ k
    u = torch.linalg.svd(covariance)[0][:, 0].detach()
    value = (p[:, None] * into(v, rho_v, u.expand_as(v))).norm(dim=-1).sum()
    query = tau * into(q, rho_q, covariance.T @ u).norm()
    key = tau * (p * (apart @ u).abs() * into(k, rho_k, q.expand_as(k)).norm(dim=-1)).sum()
    return value + query + key


def test_a_token_that_does_not_see_itself_reaches_its_row_by_its_query_alone() -> None:
    attention = layer("strict", certificate="causal")
    x = torch.randn(TOKENS, WIDTH)
    before = attention.causal_bound(), attention.lipschitz_bound("token_max")
    assert not attention(x)[0].any()  # the null token's value
    with torch.no_grad():
        attention.log_sharpness[0] = -30.0  # no queries: rows know the past only
        attention.log_sharpness[1:] += 1.0
        dense = jacobian(attention, x)
        scaled = torch.stack([dense[i, :, i] for i in range(TOKENS)]).norm() / dense.norm()
        assert scaled < 1e-10
        assert attention.causal_bound() <= attention.lipschitz_target
        assert attention.lipschitz_bound("token_max") > 1e6 * before[1]


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
