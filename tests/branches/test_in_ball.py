"""Attention in the unit ball: its formula, its Jacobian, its theorem."""

from functools import partial

import pytest
import torch

from invformer.branches.in_ball import bounds as bounded
from invformer.branches.in_ball.attention import BoundedAttention
from tests.support.builders import mask_of, moved
from tests.support.problems import attend_in_ball, jacobian, of_one_layer

TOKENS, WIDTH, HEADS, D_HEAD = 7, 12, 3, 5


def layer(kind: str = "bias", certificate: str = "token_max") -> BoundedAttention:
    """A float64 layer with nothing at its start value."""
    torch.manual_seed(0)
    position = mask_of(kind, HEADS, TOKENS)
    options = {"certificate": certificate, "strictly_causal": kind == "strict"}
    return moved(BoundedAttention(WIDTH, HEADS, D_HEAD, position, 0.9, **options))


def plain(attention: BoundedAttention, x: torch.Tensor) -> torch.Tensor:
    """The formula, head by head."""
    bias = attention.position(len(x))
    return attend_in_ball(x, *attention.weights(), bias, attention.strictly_causal)


@pytest.mark.parametrize("kind", ["bias", "causal", "full", "strict"])
def test_bounded_attention_is_softmax_attention_of_points_in_the_unit_ball(kind: str) -> None:
    attention = layer(kind)
    x = 3 * torch.randn(TOKENS, WIDTH)
    torch.testing.assert_close(attention(x), plain(attention, x))


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


def test_the_constant_knows_neither_length_nor_bias() -> None:
    short, long = layer("causal"), layer("bias")
    long.load_state_dict(short.state_dict(), strict=False)
    assert short.lipschitz_bound("token_max") == long.lipschitz_bound("token_max")


def test_the_causal_certificate_allows_more_than_token_max_does() -> None:
    heads = {"token_max": layer(), "causal": layer(certificate="causal")}
    sizes = {name: attention.weights().g.norm().item() for name, attention in heads.items()}
    assert sizes["causal"] > 1.2 * sizes["token_max"]
    assert heads["causal"].lipschitz_bound("token_max") > heads["causal"].lipschitz_target


def test_a_token_that_does_not_see_itself_reaches_its_row_by_its_query_alone() -> None:
    attention = layer("strict", certificate="causal")
    x = torch.randn(TOKENS, WIDTH)
    before = attention.causal_bound(), attention.lipschitz_bound("token_max")
    assert not attention(x)[0].any()  # the null token's value
    with torch.no_grad():
        attention.log_sharpness[0] = -30.0  # no queries: rows know the past only
        attention.log_sharpness[1:] += 1.0
        dense = jacobian(partial(plain, attention), x)
        scaled = torch.stack([dense[i, :, i] for i in range(TOKENS)]).norm() / dense.norm()
        assert scaled < 1e-10
        assert attention.causal_bound() <= attention.lipschitz_target
        assert attention.lipschitz_bound("token_max") > 1e6 * before[1]
