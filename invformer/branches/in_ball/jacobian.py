"""Products with the Jacobian of attention in the ball, and local bounds, of several at once."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.in_ball import bounds
from invformer.branches.jacobian import (
    Chosen,
    Measured,
    Products,
    StackedAttention,
    at_chosen,
    by_row,
    take,
)
from invformer.numerics.ball import AttentionPoint, BallPoint, attention_point
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.token_shift import advance, delay


class StackedBoundedAttention(StackedAttention):
    """[P_h v_h]_h G; queries, keys and values are in the unit ball."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W of queries, keys and values, and G, of all heads."""
        return merge_heads(weights.w_qkv.flatten(0, 1)), weights.g.flatten(0, 1)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """P v; the points in the ball and P are kept."""
        q, k, v = split_heads(z, 3 * self.num_heads).chunk(3, dim=-3)
        if self.branches[0].strictly_causal:
            k, v = delay(k), delay(v)
        at = attention_point(q, k, v, self.weights[index].temperature, self.bias[index])
        self.points.append(at)
        return merge_heads(at.p @ at.v)

    def products(self, chosen: Chosen, is_own: Float[Tensor, "branches R tokens 1"]) -> Products:
        """dY_i = Σ_j (P_ij dv_j + dP_ij v_j) for each head, with
        dP_i = τ (diag P_i − P_i P_iᵀ) a_i, a_ij = dq_i·k_j + q_i·dk_j.
        """
        strictly_causal = self.branches[0].strictly_causal
        *points, p, temperature = self.stacked_points()
        q, q_rho, *others = (t.transpose(2, 3) for t in points)
        at_q = BallPoint(*(take(t, chosen).flatten(1, 2) for t in (q, q_rho)))
        k, k_rho, v, v_rho = (by_row(t, chosen) for t in others)
        at_k, at_v = BallPoint(k, k_rho), BallPoint(v, v_rho)
        p = take(p.permute(0, 1, 3, 4, 2), chosen).flatten(1, 2)
        scaled, weight = p * temperature[:, None, None, :, 0, 0], p.unsqueeze(-1)
        q = at_q.u.unsqueeze(2)

        def of_softmax(a: Tensor) -> Tensor:
            return scaled * (a - (p * a).sum(2, keepdim=True))

        def jvp(dz: Tensor) -> Tensor:
            dq, dk, dv = dz.chunk(3, -1)
            if strictly_causal:
                dk, dv = delay(dk), delay(dv)
            dq, dk, dv = map(self.heads, (at_chosen(dq, chosen).squeeze(2), dk, dv))
            dq, dk, dv = at_q.derivative(dq), at_k.derivative(dk), at_v.derivative(dv)
            dp = of_softmax(torch.addcmul(dq.unsqueeze(2) * k, q, dk).sum(-1)).unsqueeze(-1)
            return torch.addcmul(weight * dv, dp, v).sum(2).flatten(-2)

        def vjp(dy: Tensor) -> Tensor:
            dy = self.heads(dy).unsqueeze(2)
            da = of_softmax((dy * v).sum(-1)).unsqueeze(-1)
            dq = is_own * at_q.derivative((da * k).sum(2)).flatten(-2).unsqueeze(2)
            dk = at_k.derivative(da * q).flatten(-2)
            dv = at_v.derivative(weight * dy).flatten(-2)
            if strictly_causal:
                dk, dv = advance(dk), advance(dv)
            return torch.cat([dq, dk, dv], -1)

        return self.of_maps(Products(jvp, vjp), chosen)

    def local_bound(
        self, measured: Measured, tight: bool, point: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Float[Tensor, "sequences"]:
        """As :meth:`.StackedMaps.local_bound`, by :func:`.in_ball.bounds.local_bound`."""
        assert measured != "entry_max"
        w_qkv, _, g = weights
        how = measured, self.branches[0].strictly_causal, tight
        return bounds.local_bound(AttentionPoint(*point), w_qkv, g, *how)
