"""Derivatives of single rows of softmax attention: what one output token owes to all inputs.

    Y_i = Σ_j P_ij v_j,   P_i = softmax_j S_ij,   dS_ij = τ (dq_i·k_j + q_i·dk_j)

A row takes O(N) where the whole Jacobian takes O(N²).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

# Output tokens, one for each vector.
Chosen = Integer[Tensor, "branches sequences K"]


@dataclass(frozen=True)
class AttentionRows:
    """K rows i at once; tokens stand before heads, and batch dimensions broadcast."""

    p: Float[Tensor, "*batch K tokens heads"]
    scaled: Float[Tensor, "*batch K tokens heads"]  # τ P
    q: Float[Tensor, "*batch K #tokens heads d"]
    k: Float[Tensor, "*batch #K tokens heads d"]
    v: Float[Tensor, "*batch #K tokens heads d"]

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Float[Tensor, "*batch K heads d"]:
        """dY_i = Σ_j (P_ij dv_j + (dP)_ij v_j) for dq_i, dk and dv."""
        ds = self.of_softmax(torch.addcmul(dq.unsqueeze(-3) * self.k, self.q, dk).sum(-1))
        return torch.addcmul(self.p.unsqueeze(-1) * dv, ds.unsqueeze(-1), self.v).sum(-3)

    def vjp(self, g: Float[Tensor, "*batch K heads d"]) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of q_i, k and v: the adjoint of :meth:`jvp`."""
        g = g.unsqueeze(-3)
        ds = self.of_softmax((g * self.v).sum(-1)).unsqueeze(-1)
        return (ds * self.k).sum(-3), ds * self.q, self.p.unsqueeze(-1) * g

    def of_softmax(self, a: Tensor) -> Tensor:
        """τ (diag(P_i) − P_i P_iᵀ) a_i."""
        return self.scaled * (a - (self.p * a).sum(-2, keepdim=True))


def take(t: Float[Tensor, "branches sequences tokens *rest"], chosen: Chosen) -> Tensor:
    """The chosen tokens of each, (branches, sequences, K, *rest); as many as there are: all."""
    if chosen.shape[-1] == t.shape[2]:
        return t
    index = chosen.view(*chosen.shape, *[1] * (t.ndim - 3))
    return t.gather(2, index.expand(*chosen.shape, *t.shape[3:]))


def at_chosen(x: Float[Tensor, "branches R tokens m"], chosen: Chosen) -> Tensor:
    """Each row at its chosen token, (branches, R, 1, m): of rows of J the diagonal blocks."""
    index = chosen.flatten(1)[..., None, None]
    return x.gather(2, index.expand(-1, -1, 1, x.shape[-1]))


def by_row(t: Float[Tensor, "branches sequences *rest"], chosen: Chosen) -> Tensor:
    """Those of the sequence of each row, (branches, R, *rest) if that is not one sequence."""
    return t if t.shape[1] == 1 else t.repeat_interleave(chosen.shape[-1], 1)
