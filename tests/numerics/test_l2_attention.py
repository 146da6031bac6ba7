"""The tied L2 attention core: against a naive loop and automatic differentiation."""

import math

import pytest
import torch
from torch import Tensor

from invformer.numerics.l2_attention import (
    attention_weights,
    l2_attention,
    l2_attention_jvp,
    l2_attention_vjp,
)
from invformer.numerics.linear_map import dense_jacobian

H, N, D_HEAD = 3, 6, 4


def causal(num_tokens: int = N) -> Tensor:
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    return torch.zeros(1, num_tokens, num_tokens).masked_fill(hidden, -math.inf)


BIASES = {
    "none": lambda: None,
    "causal": causal,
    "relative": lambda: torch.randn(H, N, N),
    "causal and relative": lambda: torch.randn(H, N, N) + causal(),
}


def naive_weights(q: Tensor, bias: Tensor | None) -> Tensor:
    """Row by row, distance by distance."""
    p = torch.zeros(H, N, N)
    for h in range(H):
        for i in range(N):
            for j in range(N):
                b = 0.0 if bias is None else float(bias[h % len(bias), i, j])
                p[h, i, j] = math.exp(b - float((q[h, i] - q[h, j]).square().sum()) / D_HEAD**0.5)
            p[h, i] /= p[h, i].sum()
    return p


@pytest.mark.parametrize("kind", BIASES)
def test_attention_weights_agree_with_a_naive_loop(kind: str) -> None:
    q, bias = torch.randn(2, H, N, D_HEAD), BIASES[kind]()
    p = attention_weights(q, bias)
    torch.testing.assert_close(p, torch.stack([naive_weights(sample, bias) for sample in q]))
    torch.testing.assert_close(l2_attention(q, bias), p @ q)


@pytest.mark.parametrize("kind", BIASES)
def test_analytic_products_agree_with_automatic_differentiation(kind: str) -> None:
    q, bias = 1.5 * torch.randn(2, H, N, D_HEAD), BIASES[kind]()
    dq, g = torch.randn_like(q), torch.randn_like(q)
    p = attention_weights(q, bias)
    pulled, pull_back = torch.func.vjp(lambda z: l2_attention(z, bias), q)[0:2]
    torch.testing.assert_close(pulled, p @ q)
    torch.testing.assert_close(l2_attention_vjp(q, p, g), pull_back(g)[0])
    push_forward = torch.func.vjp(lambda c: pull_back(c)[0], torch.zeros_like(q))[1]
    torch.testing.assert_close(l2_attention_jvp(q, p, dq), push_forward(dq)[0])


def test_the_jacobian_has_the_block_form_of_the_paper() -> None:
    """J_ij = P_ij I + δ_ij (2/s) C_i − (2/s) P_ij (q_j − Y_i)(q_j − q_i)ᵀ."""
    q = torch.randn(1, N, D_HEAD)
    p, s = attention_weights(q, causal())[0], D_HEAD**0.5
    y, x = p @ q[0], q[0]
    blocks = torch.zeros(N, D_HEAD, N, D_HEAD)
    for i in range(N):
        for j in range(N):
            rank_one = torch.outer(x[j] - y[i], x[j] - x[i])
            blocks[i, :, j, :] = p[i, j] * (torch.eye(D_HEAD) - 2 / s * rank_one)
        offset = x - y[i]
        blocks[i, :, i, :] += 2 / s * (offset.mT * p[i]) @ offset
    dense = dense_jacobian(lambda z: l2_attention(z.unsqueeze(0), causal())[0], x)
    torch.testing.assert_close(dense, blocks.reshape(N * D_HEAD, -1))


def test_a_hidden_token_has_weight_zero_and_products_stay_finite() -> None:
    q = 100 * torch.randn(H, N, D_HEAD)
    p = attention_weights(q, causal())
    assert (p.triu(1) == 0).all()
    for product in (l2_attention_jvp, l2_attention_vjp):
        assert product(q, p, torch.randn_like(q)).isfinite().all()


def test_a_common_shift_changes_nothing_but_the_value_it_adds() -> None:
    q, shift = torch.randn(H, N, D_HEAD), 1e5 * torch.randn(D_HEAD)
    torch.testing.assert_close(
        attention_weights(q + shift), attention_weights(q), rtol=1e-8, atol=1e-10
    )
    p, dq = attention_weights(q), torch.randn_like(q)
    moved = l2_attention_jvp(q + shift, p, dq)
    torch.testing.assert_close(moved, l2_attention_jvp(q, p, dq), rtol=1e-8, atol=1e-8)


def test_single_precision_survives_an_offset_that_ruins_the_uncentred_expansion() -> None:
    q = torch.randn(H, N, D_HEAD)
    exact = attention_weights(q)
    rounded = (q + 300).float()
    plain = (
        (2 * rounded @ rounded.mT - rounded.square().sum(-1).unsqueeze(-2)) / D_HEAD**0.5
    ).softmax(-1)
    assert (attention_weights(rounded) - exact).abs().max() < 2e-4
    assert (plain - exact).abs().max() > 1e-3


def test_rows_of_a_prefix_do_not_change_when_tokens_are_appended() -> None:
    q = torch.randn(H, N, D_HEAD)
    prefix = attention_weights(q[:, :4], causal(4))
    torch.testing.assert_close(
        attention_weights(q, causal())[:, :4, :4], prefix, rtol=0, atol=1e-15
    )


def test_coincident_tokens_have_finite_derivatives() -> None:
    q = torch.randn(H, 1, D_HEAD).expand(H, N, D_HEAD).clone().requires_grad_()
    l2_attention(q, causal()).square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_at_least_in_half_precision_and_under_autocast(dtype) -> None:
    q = (3 * torch.randn(H, N, D_HEAD)).to(dtype)
    exact = attention_weights(q.double())
    assert attention_weights(q).dtype == torch.float32
    torch.testing.assert_close(attention_weights(q).double(), exact, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = attention_weights(q.float())
    torch.testing.assert_close(under_autocast.double(), exact, rtol=1e-4, atol=1e-6)
    assert l2_attention(q).dtype == dtype


def test_any_leading_dimensions_are_batch_dimensions() -> None:
    q = torch.randn(2, 5, H, N, D_HEAD)
    bias = BIASES["causal and relative"]()
    together = l2_attention(q, bias)
    p, dq = attention_weights(q, bias), torch.randn_like(q)
    for index in [(0, 0), (1, 3)]:
        torch.testing.assert_close(together[index], l2_attention(q[index], bias))
        torch.testing.assert_close(
            l2_attention_jvp(q, p, dq)[index], l2_attention_jvp(q[index], p[index], dq[index])
        )
