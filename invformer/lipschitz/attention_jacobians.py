"""Stacked attention branches, with products of rows and diagonal blocks of their Jacobians."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.kernels.blocked import toeplitz
from invformer.lipschitz.jacobians import Chosen, StackedBranches, by_branch, plus_product
from invformer.nn.attention import merge_heads, side_by_side, split_heads
from invformer.nn.bounded_attention import merge, split
from invformer.nn.position_bias import CausalMask, RelativePositionBias
from invformer.nn.residual import ResidualWeights
from invformer.numerics import bounded_attention as bounded_core
from invformer.numerics import l2_attention as core
from invformer.numerics.attention_rows import AttentionRows
from invformer.numerics.ball import BallPoint
from invformer.numerics.linear_map import LinearMap


class StackedAttention(StackedBranches):
    """Input maps W side by side, output maps G below one another, and biases of the logits."""

    def __init__(
        self, branches: Sequence[Any], layers: Sequence[ResidualWeights], *at: Any
    ) -> None:
        super().__init__(branches, layers, *at)
        self.num_heads = len(self.weights[0].g)
        self.w = torch.stack([self.side_by_side(w) for w in self.weights])
        self.g = torch.stack([w.g.flatten(0, 1) for w in self.weights])
        self.bias = stacked_biases(branches, self.num_tokens).to(self.w)
        self.shift = None if self.centre is None else torch.bmm(self.centre, self.w)

    def side_by_side(self, weights: Any) -> Tensor:
        """W of all heads as one matrix."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """The layer; what its Jacobian is made of is kept."""
        index = len(self.inputs)
        u, w = self.enter(x), self.w[index]
        z = u @ w if self.shift is None else plus_product(self.shift[index], u, w)
        return self.leave(x, merge_heads(self.attend(index, z)), self.g[index])

    def attend(self, index: int, z: Tensor) -> Float[Tensor, "sequences heads tokens d"]:
        """P v of every head, from the projections."""
        raise NotImplementedError

    def maps(self) -> tuple[Tensor, Tensor]:
        """W and G of f itself: D W and G D⁻¹ unfolded."""
        if self.scale is None:
            return self.w, self.g
        return self.w / self.scale.unsqueeze(-1), self.g * self.scale.unsqueeze(1)


class StackedL2Attention(StackedAttention):
    """Σ_h (P^h q^h) G_h with q = X W_h."""

    def side_by_side(self, weights: Any) -> Tensor:
        """[W_1, …, W_H]."""
        return side_by_side(weights.w_q)

    def attend(self, index: int, z: Tensor) -> Float[Tensor, "sequences heads tokens d"]:
        """P q by few operations; q relative to the first token and P are kept."""
        k = split_heads(z - z[..., :1, :], self.num_heads)
        inner, root = k @ k.mT, math.sqrt(k.shape[-1])
        lengths = inner.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        logits = torch.add(self.bias[index], inner, alpha=2 / root)
        p = torch.sub(logits, lengths, alpha=1 / root).softmax(-1)
        self.points.append((k, p))
        return p @ split_heads(z, self.num_heads)

    def evidence(self) -> list[Tensor]:
        """q relative to the first token, P, W and G."""
        heads = (self.num_heads, -1)
        w_q = self.w.unflatten(2, heads).transpose(1, 2)
        return [*super().evidence(), w_q, self.g.unflatten(1, heads)]

    def rows(self, chosen: Chosen) -> LinearMap:
        """dY_i = Σ_j P_ij dq_j + s_ij k_j with s = C_i (dq_i·k_j + (k_i − k_j)·dq_j) for each head,
        C_i = (2/√d)(diag P_i − P_i P_iᵀ).

        dq = dX W never appears, nor its cotangent: with B_j = W k_j, g = G a and t = C_i (g·k_j)
        Jᵀa is Σ_h P_ij W g + t_ij (B_i − B_j) + δ_ij Σ_l t_il B_l at token j.
        """
        k, p = super().evidence()
        w, g_out = self.maps()
        num_heads, d = self.num_heads, k.shape[-1]
        w_h = w.unflatten(2, (num_heads, d)).transpose(1, 2).contiguous()  # (branches, H, D, d)

        def times_w(z: Tensor) -> Tensor:
            """W_h z_h, from (branches, sequences, H, K, d) to (branches, sequences, K, H, D)."""
            return per_head(z, w_h.mT).transpose(2, 3)

        b = times_w(k).contiguous()
        p = take(p.permute(0, 1, 3, 4, 2), chosen)  # (branches, sequences, K, N, H)
        scaled, b_i, here = p * (2 / math.sqrt(d)), take(b, chosen), self.marked(chosen)
        together = b.flatten(2, 3)  # (branches, sequences, N H, D)

        def of_softmax(a: Tensor) -> Tensor:
            return scaled * (a - (p * a).sum(3, keepdim=True))

        def push(dx: Tensor) -> Tensor:
            own_dx = own(dx, chosen)
            of_query = (own_dx @ together.mT).unflatten(-1, (-1, num_heads))
            of_key = dx @ b_i.mT - (dx.transpose(2, 3) @ b.mT).transpose(2, 3)
            s = of_softmax(of_query + of_key).permute(0, 1, 4, 2, 3)
            dv = per_head((p.mT @ dx).transpose(2, 3), w_h)
            return by_branch((dv + s @ k).transpose(2, 3).flatten(3), g_out)

        def pull(dy: Tensor) -> Tensor:
            g = by_branch(dy, g_out.mT).unflatten(-1, (num_heads, d)).transpose(2, 3)
            t = of_softmax((g @ k.mT).permute(0, 1, 3, 4, 2)).contiguous()
            dx = torch.cat([p, t], -1) @ torch.cat([times_w(g), b_i], 3)
            dx = dx - (t.transpose(2, 3) @ b).transpose(2, 3)
            return torch.addcmul(dx, here, (t.flatten(3) @ together).unsqueeze(3))

        return self.of_inputs(self.linear(push, pull))

    def diagonal(self) -> LinearMap:
        """P_ii I + (2/√d) C_i of every head."""
        k, p = (t.unsqueeze(2) for t in super().evidence())
        w, g = self.maps()

        def product(dx: Tensor, left: Tensor, right: Tensor) -> Tensor:
            dq = split_heads(by_branch(dx, left), self.num_heads)
            return by_branch(merge_heads(core.diagonal_block_product(k, p, dq)), right)

        j = self.linear(lambda dx: product(dx, w, g), lambda dy: product(dy, g.mT, w.mT))
        return self.of_inputs(j)


class StackedBoundedAttention(StackedAttention):
    """[P_h v_h]_h G; queries, keys and values are in the unit ball."""

    def side_by_side(self, weights: Any) -> Tensor:
        """Those of queries, keys and values."""
        return side_by_side(weights.w_qkv.flatten(0, 1))

    def attend(self, index: int, z: Tensor) -> Float[Tensor, "sequences heads tokens d"]:
        """P v; the points in the ball and P are kept."""
        q, k, v = self.branches[0].delayed(split(z, self.num_heads))
        temperature = self.weights[index].temperature
        at = bounded_core.attention_point(q, k, v, temperature, self.bias[index])
        self.points.append(at.tensors())
        return at.p @ at.v.u

    def evidence(self) -> list[Tensor]:
        """Points, P, τ, W and G."""
        w_qkv = torch.stack([w.w_qkv for w in self.weights])
        return [*super().evidence(), w_qkv, self.g.unflatten(1, (self.num_heads, -1))]

    def rows(self, chosen: Chosen) -> LinearMap:
        """dS_ij = τ (dq_i·k_j + q_i·dk_j)."""
        (w, g), here = self.maps(), self.marked(chosen)
        *points, p, temperature = super().evidence()
        q, q_rho, *others = (t.transpose(2, 3) for t in points)
        like, heads = self.branches[0], q.shape[-2:]
        at_q = BallPoint(take(q, chosen), take(q_rho, chosen))
        k, k_rho, v, v_rho = (t.unsqueeze(2) for t in others)
        at_k, at_v = BallPoint(k, k_rho), BallPoint(v, v_rho)
        p = take(p.permute(0, 1, 3, 4, 2), chosen)
        scaled = p * temperature[:, None, None, None, :, 0, 0]
        rows = AttentionRows(p, scaled, k, at_q.u.unsqueeze(3), v)

        def push(dx: Tensor) -> Tensor:
            dz = like.delayed(by_branch(dx, w).chunk(3, -1))
            dq, dk, dv = (part.unflatten(-1, heads) for part in dz)
            dq = at_q.derivative(own(dq.flatten(-2), chosen).unflatten(-1, heads))
            dy = rows.jvp(dq, at_k.derivative(dk), at_v.derivative(dv))
            return by_branch(dy.flatten(-2), g)

        def pull(dy: Tensor) -> Tensor:
            dq, dk, dv = rows.vjp(by_branch(dy, g.mT).unflatten(-1, heads))
            dq = here * at_q.derivative(dq).flatten(-2).unsqueeze(-2)
            dz = dq, at_k.derivative(dk).flatten(-2), at_v.derivative(dv).flatten(-2)
            return by_branch(torch.cat(like.delayed_adjoint(dz), -1), w.mT)

        return self.of_inputs(self.linear(push, pull))

    def diagonal(self) -> LinearMap:
        """By own queries, and by own keys and values if a token sees itself."""
        w, g = self.maps()
        *points, temperature = super().evidence()
        wide = (*(t.unsqueeze(2) for t in points), temperature[:, None, None])
        at, like = bounded_core.AttentionPoint.of(*wide), self.branches[0]

        def push(dx: Tensor) -> Tensor:
            dq, dk, dv = like.delayed_diagonal(split(by_branch(dx, w), self.num_heads))
            dy = bounded_core.diagonal_block_jvp(at, dq, dk, dv)
            return by_branch(merge_heads(dy), g)

        def pull(dy: Tensor) -> Tensor:
            dv = split_heads(by_branch(dy, g.mT), self.num_heads)
            dz = like.delayed_diagonal(bounded_core.diagonal_block_vjp(at, dv))
            return by_branch(merge(dz), w.mT)

        return self.of_inputs(self.linear(push, pull))


def stacked_biases(
    branches: Sequence[Any], num_tokens: int
) -> Float[Tensor, "branches heads tokens tokens"]:
    """The numbers that are added to the logits of every branch."""
    positions = [branch.position for branch in branches]
    if all(type(position) is RelativePositionBias for position in positions):
        tables = torch.stack([position.table[:, : num_tokens - 1] for position in positions])
        return toeplitz(F.pad(tables, (1, 0)), num_tokens)
    if not all(isinstance(position, CausalMask) for position in positions):
        return torch.stack([position(num_tokens) for position in positions])
    return toeplitz(torch.stack([p.by_lag(num_tokens) for p in positions]), num_tokens)


def take(t: Float[Tensor, "branches sequences tokens *rest"], chosen: Chosen) -> Tensor:
    """The chosen tokens of each, (branches, sequences, K, *rest)."""
    index = chosen.view(*chosen.shape, *[1] * (t.ndim - 3))
    return t.gather(2, index.expand(*chosen.shape, *t.shape[3:]))


def own(x: Float[Tensor, "branches sequences K tokens m"], chosen: Chosen) -> Tensor:
    """The chosen token of each vector, (branches, sequences, K, m)."""
    index = chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])
    return x.gather(3, index).squeeze(3)


def per_head(
    x: Float[Tensor, "branches sequences heads rows m"], w: Float[Tensor, "branches heads m n"]
) -> Float[Tensor, "branches sequences heads rows n"]:
    """x W_h of every head and branch."""
    return x @ w.unsqueeze(1)
