"""Attention layers that forget where they write, for the constant of a whole network.

    y = x + f(x),   f(X) = A(X) − β X ĜᵀĜ,   A(X) = Z(X) Ĝ,   ‖Ĝ‖₂ ≤ 1,   Lip(Z) ≤ c in token_max

Ĝ, (channels, D), is the attention's output map. A token loses a share β of what it has where the
attention writes, so that the two cannot add up. The layer's constant in token_max is at most

    k = √(1 + c²/(β(2 − β))),

1.10 for c = 0.4 and β = 0.55, where only 1 + c = 1.4 is known without forgetting. Lip(f) ≤ c + β.

Proof. Let x_i change by a and Z(X)_i by b, ‖a‖ ≤ 1 and ‖b‖ ≤ c. Along a pair of singular vectors of
Ĝ with the value σ (0 outside), y_i changes by (1 − βσ²) a_σ + σ b_σ. Its square is at most
((1 − βσ²)²/θ + σ²c²/(1 − θ)) (θ a_σ² + (1 − θ) b_σ²/c²) for every 0 < θ < 1 (Cauchy–Schwarz), and
the second factors add up to at most 1. The first one is convex in σ², so at most the larger of 1/θ
(σ = 0) and (1 − β)²/θ + c²/(1 − θ) (σ = 1). Both are k² where θ/(1 − θ) = β(2 − β)/c². ∎
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.branch import LipschitzBranch, cast
from invformer.branches.in_ball.attention import BoundedAttention, BoundedWeights
from invformer.branches.in_ball.bounds import head_gains
from invformer.nn.certificate import require_type
from invformer.numerics.norms import Norm, Tokens, unknown_norm
from invformer.numerics.rounding import product_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound


class ForgettingWeights(NamedTuple):
    """Those of :class:`.BoundedAttention`, and E = √β Ĝ as (H d, D)."""

    w_qkv: Tensor
    temperature: Tensor
    g: Tensor
    forgotten: Float[Tensor, "channels width"]

    @property
    def attention(self) -> BoundedWeights:
        """Those of A."""
        return BoundedWeights(self.w_qkv, self.temperature, self.g)


class ForgettingAttention(LipschitzBranch[ForgettingWeights]):
    """f(X) = A(X) − X EᵀE with E = √β Ĝ.

    Args:
        attention: A, bounded in token_max.
        share: β in (0, 1), less than 1 − c.
    """

    is_proven = True

    def __init__(self, attention: BoundedAttention, share: float) -> None:
        require_type("attention", attention, (BoundedAttention,))
        super().__init__(attention.lipschitz_target + share)
        self.attention, self.share = attention, share

    def weights(self) -> ForgettingWeights:
        """Those of A and √β Ĝ, both less if certification found f above its target."""
        w_qkv, temperature, g = self.attention.weights()
        forgotten = (self.correction * self.share).sqrt() * self.attention.w_g()
        return ForgettingWeights(w_qkv, temperature, self.correction * g, forgotten)

    def forward(self, x: Tokens, weights: ForgettingWeights | None = None) -> Tokens:
        """A(X) − X EᵀE."""
        weights = weights or self.weights()
        e = weights.forgotten
        return self.attention(x, weights.attention) - (x @ e.mT) @ e

    def lipschitz_bound(
        self, norm: Norm, dtype: torch.dtype | None = None, weights: ForgettingWeights | None = None
    ) -> float:
        """Lip(A) + ‖E‖₂², in token_max and frobenius."""
        if norm == "entry_max":
            raise unknown_norm(norm)
        weights = weights or self.weights()
        size = spectral_norm_bound(cast(weights.forgotten, dtype)).item()
        of_attention = self.attention.lipschitz_bound(norm, dtype, weights.attention)
        return sum_up(of_attention, product_up(size, size))

    def layer_constant(self) -> float:
        """A proven k in token_max of y = x + f(x), for the weights as they are in float64.

        Let a_h be a bound of head h, whose output is z_h, and M the matrix I − EᵀE, divided by √θ,
        above √H a_h G_h, divided by √(1 − θ). Then y_i changes by a row times M, and the row,
        [√θ dx_i, √(1 − θ) dz_h/(√H a_h)]_h, is no longer than 1: k = ‖M‖₂, for any E and G.
        Rounding the products changes it by less than what is added (D ≤ 2¹², θ ≥ 1/4).
        """
        weights = self.weights()
        e, g = weights.forgotten.double(), weights.g.double()
        gains = e.new_tensor(head_gains(weights.w_qkv[None], weights.temperature[None])[0])
        theta = forgetting_constant(self.attention.target_scale().item(), self.share) ** -2
        kept = torch.eye(e.shape[-1]).to(e) - e.mT @ e
        written = (math.sqrt(len(g)) * gains[:, None, None] * g).flatten(0, 1)
        both = torch.cat([kept / math.sqrt(theta), written / math.sqrt(1 - theta)])
        return sum_up(spectral_norm_bound(both).item(), 2.0**-40 * sum(both.shape))


def forgetting_constant(c: float, share: float) -> float:
    """√(1 + c²/(β(2 − β)))."""
    return math.sqrt(1 + c**2 / (share * (2 - share)))
