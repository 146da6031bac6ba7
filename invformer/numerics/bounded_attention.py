"""Softmax attention of queries, keys and values held in the unit ball.

Per head, with z the projections of X and ψ(z) = z/√(1 + ‖z‖²) the map into the open unit ball:

    q, k, v = ψ(z_Q), ψ(z_K), ψ(z_V),    P = softmax_j(τ q_i·k_j + b_ij),    Y = P v

ψ has the Jacobian ρ (I − ψψᵀ) with ρ = √(1 − ‖ψ‖²) = 1/√(1 + ‖z‖²), whose norm is ρ ≤ 1: what lies
near the sphere hardly moves. ``bounds/bounded.py`` makes a Lipschitz constant of that.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from invformer.numerics.ball import BallPoint, to_ball


class AttentionPoint(NamedTuple):
    """Where an attention is linearised: q, k and v of every head, P and τ."""

    q: BallPoint
    k: BallPoint
    v: BallPoint
    p: Float[Tensor, "*batch heads tokens tokens"]
    temperature: Float[Tensor, "heads 1 1"]

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything in one row, for :meth:`of`."""
        return *self.q, *self.k, *self.v, self.p, self.temperature

    @classmethod
    def of(cls, *tensors: Tensor) -> "AttentionPoint":
        """From :meth:`tensors`."""
        q, k, v = (BallPoint(tensors[i], tensors[i + 1]) for i in (0, 2, 4))
        return cls(q, k, v, tensors[6], tensors[7])


def attention_point(
    z_q: Float[Tensor, "*batch heads tokens d_head"],
    z_k: Float[Tensor, "*batch heads tokens d_head"],
    z_v: Float[Tensor, "*batch heads tokens d_head"],
    temperature: Float[Tensor, "heads"],
    bias: Float[Tensor, "#heads tokens tokens"],
) -> AttentionPoint:
    """Everything that values and derivatives need, in the precision of the projections.

    Args:
        z_q: projections before the map into the ball; z_k and z_v likewise.
        temperature: τ ≥ 0, the size of the logits.
        bias: added to the logits; −∞ hides (i, j).
    """
    q, k, v = (to_ball(z) for z in (z_q, z_k, z_v))
    scale = temperature[..., None, None].to(z_q)
    p = (scale * q.u @ k.u.mT + bias).softmax(-1)
    return AttentionPoint(q, k, v, p, scale)
