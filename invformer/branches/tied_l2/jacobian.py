"""Products with the Jacobian of tied L2 attention, and local bounds, of several at once."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.jacobian import (
    PER_SPECTRAL_NORM,
    Chosen,
    Measured,
    Products,
    StackedAttention,
    at_chosen,
    take,
)
from invformer.branches.tied_l2 import local_bounds
from invformer.numerics.l2_attention import merge_heads, split_heads

# Spectral norms of D × D matrices for each token in a tight bound.
NORMS_PER_TOKEN = 6


class StackedL2Attention(StackedAttention):
    """Σ_h (P^h q^h) G_h with q = X W_h."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W and G of all heads."""
        return merge_heads(weights.w_q), weights.g.flatten(0, 1)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """P q by few operations; q and P are kept."""
        q = self.heads(z).transpose(1, 2)
        k = q - q[:, :, :1]
        # b_ij + (2 k_i·k_j − ‖k_j‖²)/√d, where the diagonal of b is zero
        bias, k = self.bias[index].expand(*k.shape[:3], -1).flatten(0, 1), k.flatten(0, 1)
        logits = torch.baddbmm(bias, k, k.mT, alpha=2 / math.sqrt(k.shape[-1]))
        lengths = logits.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        p = torch.sub(logits, lengths, alpha=0.5).softmax(-1).view(*q.shape[:3], -1)
        self.points.append((z, p))
        return merge_heads(p @ q)

    def products(self, chosen: Chosen, is_own: Float[Tensor, "branches R tokens 1"]) -> Products:
        """dY_i = Σ_j P_ij dq_j − s_ij e_ij with s = C_i (e_ij·(dq_j − dq_i)) for each head,
        e_ij = q_i − q_j and C_i = (2/√d)(diag P_i − P_i P_iᵀ).
        """
        z, p = self.stacked_points()
        e = self.heads((take(z, chosen).unsqueeze(3) - z.unsqueeze(2)).flatten(1, 2))
        p = take(p.permute(0, 1, 3, 4, 2), chosen).flatten(1, 2)  # (branches, R, tokens, heads)
        minus, weight = p * (-2 / math.sqrt(e.shape[-1])), p.unsqueeze(-1)
        is_own = is_own.unsqueeze(-1)

        def minus_of_softmax(a: Tensor) -> Tensor:
            return (minus * (a - (p * a).sum(2, keepdim=True))).unsqueeze(-1)

        def jvp(dq: Tensor) -> Tensor:
            s = minus_of_softmax((dq - at_chosen(dq, chosen)).view(e.shape).mul_(e).sum(-1))
            return dq.view(e.shape).mul_(weight).addcmul_(s, e).sum(2).flatten(-2)

        def vjp(dy: Tensor) -> Tensor:
            a = self.heads(dy).unsqueeze(2)
            dq = a * e
            torch.mul(minus_of_softmax(dq.sum(-1)), e, out=dq)
            others = dq.sum(2, keepdim=True)
            dq.addcmul_(weight, a).addcmul_(is_own, others, value=-1)
            return dq.flatten(-2)

        return self.of_maps(Products(jvp, vjp), chosen)

    def local_bound(
        self, measured: Measured, tight: bool, point: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Float[Tensor, "sequences"]:
        """As :meth:`.StackedMaps.local_bound`, by :mod:`.tied_l2.local_bounds`."""
        (z, p), (w_q, g) = point, weights
        q = split_heads(z - z[..., :1, :], len(g))  # relative to the first token
        if measured != "frobenius":
            return local_bounds.token_max_local_bound(q, p, w_q, g, measured == "diagonal_block")
        tight = tight and self.affords(NORMS_PER_TOKEN * PER_SPECTRAL_NORM * g.shape[-1] ** 3)
        bound = local_bounds.tight_local_bound if tight else local_bounds.fast_local_bound
        return bound(q, p, w_q, g)
