"""Tied L2 attentions with chosen inputs and masks."""

import math

import torch
from torch import Tensor

from invformer.numerics import l2_attention as core
from tests.support.problems import AttentionProblem

MASKS = ("none", "causal", "causal and relative")


class AttentionCase(AttentionProblem):
    """f(X) = Σ_h P^h X W_h G_h at one X (or a batch of them)."""

    @property
    def q(self) -> Tensor:
        return self.x.unsqueeze(-3) @ self.w_q

    @property
    def p(self) -> Tensor:
        return core.attention_weights(self.q, self.bias)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of every local bound."""
        return self.q, self.p, self.w_q, self.g

    def f(self, x: Tensor) -> Tensor:
        return (core.l2_attention(x.unsqueeze(-3) @ self.w_q, self.bias) @ self.g).sum(-3)


def attention_case(
    seed: int,
    *,
    num_tokens: int = 16,
    d_model: int = 16,
    num_heads: int = 2,
    scale: float = 1.0,
    clustered: bool = False,
    mask: str = "none",
) -> AttentionCase:
    """Gaussian or clustered tokens, orthogonal G; diffuse attention at scale 0.1, one-hot at 5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    d_head = d_model // num_heads
    w_q = normal(num_heads, d_model, d_head) / math.sqrt(d_model)
    g = torch.linalg.qr(normal(d_model, d_model)).Q.reshape(num_heads, d_head, d_model)
    x = normal(num_tokens, d_model)
    if clustered:
        centres = normal(4, d_model)
        x = centres[torch.randint(4, (num_tokens,), generator=generator)] + 0.1 * x
    return AttentionCase(scale * x, w_q, g, logit_bias(mask, num_heads, num_tokens))


def logit_bias(mask: str, num_heads: int, num_tokens: int) -> Tensor:
    """No mask, a causal one, or a causal one with 3 − slope·(lag − 1) at lag ≥ 1."""
    position = torch.arange(num_tokens)
    lag = position[:, None] - position[None, :]
    bias = torch.zeros(num_heads, num_tokens, num_tokens)
    if "relative" in mask:
        slope = torch.tensor([2.0, 1.0, 0.4, 0.1])[torch.arange(num_heads) % 4, None, None]
        bias = torch.where(lag > 0, 3 - slope * (lag - 1), 0.0)
    return bias.masked_fill(lag < 0, -math.inf) if "causal" in mask else bias
