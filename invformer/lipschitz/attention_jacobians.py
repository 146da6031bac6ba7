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

    def product_of_rows(self, chosen: Chosen, here: Tensor) -> LinearMap:
        """dS_ij = (2/√d)(dq_i·k_j + (k_i − k_j)·dq_j), dv = dq."""
        k, p = super().evidence()
        k, p = k.transpose(2, 3), take(p.permute(0, 1, 3, 4, 2), chosen)
        own_key, key, heads = take(k, chosen).unsqueeze(3), k.unsqueeze(2), k.shape[-2:]
        scaled = p * (2 / math.sqrt(heads[-1]))
        rows, here = AttentionRows(p, scaled, key, own_key - key, key), here.unsqueeze(-1)

        def push(dx: Tensor) -> Tensor:
            dq = by_branch(dx, self.w).unflatten(-1, heads)
            return by_branch(rows.jvp(own(dq, chosen), dq, dq).flatten(-2), self.g)

        def pull(dy: Tensor) -> Tensor:
            dq, dk, dv = rows.vjp(by_branch(dy, self.g.mT).unflatten(-1, heads))
            dq = torch.addcmul(dk + dv, here, dq.unsqueeze(3))
            return by_branch(dq.flatten(-2), self.w.mT)

        return self.linear(push, pull)

    def product_of_diagonal(self) -> LinearMap:
        """P_ii I + (2/√d) C_i of every head."""
        k, p = (t.unsqueeze(2) for t in super().evidence())

        def product(dx: Tensor, left: Tensor, right: Tensor) -> Tensor:
            dq = split_heads(by_branch(dx, left), self.num_heads)
            return by_branch(merge_heads(core.diagonal_block_product(k, p, dq)), right)

        return self.linear(
            lambda dx: product(dx, self.w, self.g),
            lambda dy: product(dy, self.g.mT, self.w.mT),
        )


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

    def product_of_rows(self, chosen: Chosen, here: Tensor) -> LinearMap:
        """dS_ij = τ (dq_i·k_j + q_i·dk_j)."""
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
            dz = like.delayed(by_branch(dx, self.w).chunk(3, -1))
            dq, dk, dv = (part.unflatten(-1, heads) for part in dz)
            dq = at_q.derivative(own(dq, chosen))
            dy = rows.jvp(dq, at_k.derivative(dk), at_v.derivative(dv))
            return by_branch(dy.flatten(-2), self.g)

        def pull(dy: Tensor) -> Tensor:
            dq, dk, dv = rows.vjp(by_branch(dy, self.g.mT).unflatten(-1, heads))
            dq = here * at_q.derivative(dq).flatten(-2).unsqueeze(-2)
            dz = dq, at_k.derivative(dk).flatten(-2), at_v.derivative(dv).flatten(-2)
            return by_branch(torch.cat(like.delayed_adjoint(dz), -1), self.w.mT)

        return self.linear(push, pull)

    def product_of_diagonal(self) -> LinearMap:
        """By own queries, and by own keys and values if a token sees itself."""
        *points, temperature = super().evidence()
        wide = (*(t.unsqueeze(2) for t in points), temperature[:, None, None])
        at, like = bounded_core.AttentionPoint.of(*wide), self.branches[0]

        def push(dx: Tensor) -> Tensor:
            dq, dk, dv = like.delayed_diagonal(split(by_branch(dx, self.w), self.num_heads))
            dy = bounded_core.diagonal_block_jvp(at, dq, dk, dv)
            return by_branch(merge_heads(dy), self.g)

        def pull(dy: Tensor) -> Tensor:
            dv = split_heads(by_branch(dy, self.g.mT), self.num_heads)
            dz = like.delayed_diagonal(bounded_core.diagonal_block_vjp(at, dv))
            return by_branch(merge(dz), self.w.mT)

        return self.linear(push, pull)


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


def own(t: Float[Tensor, "branches sequences K tokens heads d"], chosen: Chosen) -> Tensor:
    """The chosen token of each vector, (branches, sequences, K, H, d)."""
    index = chosen[..., None, None, None].expand(*chosen.shape, 1, *t.shape[-2:])
    return t.gather(3, index).squeeze(3)
