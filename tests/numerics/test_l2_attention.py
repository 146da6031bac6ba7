"""The tied L2 attention core against a naive loop."""

import itertools

import pytest
import torch

from invformer.numerics.l2_attention import attention_weights, l2_attention
from tests.support.problems import l2_attention_values, plain_bias

H, N, D_HEAD = 3, 6, 4
CAUSAL = plain_bias(1, N, causal=True)


BIASES = {
    "none": lambda: None,
    "causal": lambda: CAUSAL,
    "relative": lambda: torch.randn(H, N, N),
    "causal and relative": lambda: torch.randn(H, N, N) + CAUSAL,
}


@pytest.mark.parametrize("kind", BIASES)
def test_attention_weights_agree_with_a_naive_loop(kind: str) -> None:
    q, bias = torch.randn(2, H, N, D_HEAD), BIASES[kind]()
    p, by_head = attention_weights(q, bias), torch.zeros(H, N, N) if bias is None else bias
    for i, h in itertools.product(range(2), range(H)):
        own_bias = by_head[h % len(by_head)]
        expected = l2_attention_values(q[i, h], torch.eye(N), torch.eye(D_HEAD), own_bias)
        torch.testing.assert_close(p[i, h], expected)
    torch.testing.assert_close(l2_attention(q, bias), p @ q)


def test_single_precision_survives_an_offset_that_ruins_the_uncentred_expansion() -> None:
    q = torch.randn(H, N, D_HEAD)
    exact = attention_weights(q)
    rounded = (q + 300).float()
    plain = (
        (2 * rounded @ rounded.mT - rounded.square().sum(-1).unsqueeze(-2)) / D_HEAD**0.5
    ).softmax(-1)
    assert (attention_weights(rounded) - exact).abs().max() < 2e-4
    assert (plain - exact).abs().max() > 1e-3


def test_coincident_tokens_have_finite_derivatives() -> None:
    q = torch.randn(H, 1, D_HEAD).expand(H, N, D_HEAD).clone().requires_grad_()
    l2_attention(q, CAUSAL).square().sum().backward()
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
