"""Derivatives of single rows of softmax attention: what one output token owes to all inputs.

    Y_i = Σ_j P_ij v_j,   P_i = softmax_j S_ij,   dS_ij = τ (dq_i·a_j + b_ij·dk_j)

Dot products have a = k and b_ij = q_i; squared distances −‖q_i − q_j‖²/√d have τ = 2/√d, a = q and
b_ij = q_i − q_j. A row takes O(N) where the whole Jacobian takes O(N²).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionRows:
    """K rows i at once; tokens stand before heads, and batch dimensions broadcast.

    Attributes:
        p: P_i.
        scaled: τ P_i.
        a, b, v: as above.
    """

    p: Float[Tensor, "*batch K tokens heads"]
    scaled: Float[Tensor, "*batch K tokens heads"]
    a: Float[Tensor, "*batch #K tokens heads d"]
    b: Float[Tensor, "*batch K #tokens heads d"]
    v: Float[Tensor, "*batch #K tokens heads d"]

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Float[Tensor, "*batch K heads d"]:
        """dY_i = Σ_j (P_ij dv_j + (dP)_ij v_j) for dq_i, dk and dv."""
        ds = self.of_softmax(torch.addcmul(dq.unsqueeze(-3) * self.a, self.b, dk).sum(-1))
        return torch.addcmul(self.p.unsqueeze(-1) * dv, ds.unsqueeze(-1), self.v).sum(-3)

    def vjp(self, g: Float[Tensor, "*batch K heads d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of q_i, k and v: the adjoint of :meth:`jvp`."""
        g = g.unsqueeze(-3)
        ds = self.of_softmax((g * self.v).sum(-1)).unsqueeze(-1)
        return (ds * self.a).sum(-3), ds * self.b, self.p.unsqueeze(-1) * g

    def of_softmax(self, a: Tensor) -> Tensor:
        """τ (diag(P_i) − P_i P_iᵀ) a_i."""
        return self.scaled * (a - (self.p * a).sum(-2, keepdim=True))
