"""An attention that the program does not know: the example of CONTRIBUTING.md, to copy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from invformer.branches.branch import LipschitzBranch, cast
from invformer.numerics.norms import Norm
from invformer.numerics.spectral_norm import spectral_norm_bound
from invformer.weights.position_bias import VisibilityMask
from invformer.weights.spectral import SpectralNormalised


class PositionWeights(NamedTuple):
    """P as (N, N), and G as (D, D)."""

    p: Tensor
    g: Tensor


class PositionAttention(LipschitzBranch[PositionWeights]):
    """f(X) = P X G with P = mean_h softmax_j b_h(i − j) and ‖G‖₂ ≤ c: tokens are not compared.

    Rows of P are ≥ 0 and sum to one, so ‖(P X G)_i‖₂ ≤ max_j ‖x_j‖₂ ‖G‖₂: Lip(f) ≤ c in token_max.
    """

    is_proven = True

    def __init__(self, d_model: int, position: VisibilityMask, lipschitz_target: float) -> None:
        super().__init__(lipschitz_target)
        self.position = position
        self.w_g = SpectralNormalised(torch.randn(d_model, d_model) / math.sqrt(d_model))

    def weights(self) -> PositionWeights:
        """P at full length and G = c Ĝ."""
        p = self.position(self.position.seq_len).softmax(-1).mean(0)
        return PositionWeights(p, self.w_g() * self.target_scale())

    def forward(self, x: Tensor, weights: PositionWeights | None = None) -> Tensor:
        """P X G, of the first tokens if X is shorter; a later column is zero in their rows."""
        p, g = weights or self.weights()
        n = x.shape[-2]
        return p[:n, :n] @ x @ g

    def lipschitz_bound(
        self, norm: Norm, dtype: torch.dtype | None = None, weights: PositionWeights | None = None
    ) -> float:
        """‖G‖₂ times the largest row sum of P, which rounding may have made more than one."""
        if norm != "token_max":
            raise ValueError(f"no bound of this attention is known in {norm}")
        p, g = (cast(w, dtype).double() for w in weights or self.weights())
        rows = p.sum(-1).max() * (1 + 2.0**-40)
        return (spectral_norm_bound(g) * rows).item()
