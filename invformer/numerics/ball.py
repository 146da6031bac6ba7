"""The smooth map into a ball: ψ_R(x) = x/√(1 + ‖x‖²/R²) = R ψ(x/R), the identity near zero.

Its Jacobian at x is ρ (I − uuᵀ) with u = ψ(x/R) in the open unit ball and ρ = √(1 − ‖u‖²), whose
norm is ρ ≤ 1: ψ_R never moves two points apart. ``branches/in_ball/bounds.py`` says what attention
in the ball is, and makes a Lipschitz constant of that.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.l2_attention import AttentionWeights, DenseBias, PerHead
from invformer.numerics.norms import Tokens
from invformer.numerics.precision import at_least_single, without_autocast
from invformer.numerics.private import is_transformed


class BallPoint(NamedTuple):
    """u = ψ(z) and ρ = √(1 − ‖u‖²), kept apart because 1 − ‖u‖² cancels near the sphere."""

    u: Float[Tensor, "*batch tokens d"]
    rho: Float[Tensor, "*batch tokens 1"]

    def derivative(self, dz: Tensor) -> Tensor:
        """Dψ dz = ρ (dz − u (u·dz)); symmetric, so it is its own adjoint."""
        return self.rho * (dz - self.u * (self.u * dz).sum(-1, keepdim=True))


def to_ball(z: Float[Tensor, "*batch tokens d"]) -> BallPoint:
    """ψ(z) = z/√(1 + ‖z‖²), with its ρ."""
    rho = torch.rsqrt(1 + z.square().sum(-1, keepdim=True))
    return BallPoint(z * rho, rho)


class AttentionPoint(NamedTuple):
    """Where attention in the ball is linearised: q, k and v, each with its ρ, P and τ."""

    q: PerHead
    q_rho: Float[Tensor, "*batch heads tokens 1"]
    k: PerHead
    k_rho: Float[Tensor, "*batch heads tokens 1"]
    v: PerHead
    v_rho: Float[Tensor, "*batch heads tokens 1"]
    p: AttentionWeights
    temperature: Float[Tensor, "heads 1 1"]


def attention_point(
    z_q: PerHead, z_k: PerHead, z_v: PerHead, temperature: Float[Tensor, "heads"], bias: DenseBias
) -> AttentionPoint:
    """Everything that values and derivatives need, in the precision of the projections z.

    τ ≥ 0 is the size of the logits; a bias of −∞ hides (i, j).
    """
    q, k, v = (to_ball(z) for z in (z_q, z_k, z_v))
    scale = temperature[..., None, None].to(z_q)
    p = (scale * q.u @ k.u.mT + bias).softmax(-1)
    return AttentionPoint(*q, *k, *v, p, scale)


def into_ball(x: Tokens, radius: float | None) -> Tokens:
    """ψ_R(x) in the format of x, for a ``radius`` R > 0: ‖ψ_R(x)‖₂ < R for every token.

    Without a radius it is x.
    """
    if radius is None:
        return x
    if torch.is_grad_enabled() and not is_transformed():
        mapped: Tensor = IntoBall.apply(x, radius)
        # Cast out here: torch 2.11 compiles wrong gradients if ``forward`` returns another name of
        # a tensor that it made, as ``to`` does where there is nothing to cast (pytorch#180642).
        return mapped.to(x.dtype)
    return (x * shrinkage(x, radius)).to(x.dtype)


def shrinkage(x: Tokens, radius: float) -> Float[Tensor, "*batch tokens 1"]:
    """ρ = 1/√(1 + ‖x‖²/R²), in float32 at least, also under autocast."""
    with without_autocast(x.device):
        x = at_least_single(x)
        return torch.rsqrt(1 + torch.linalg.vecdot(x, x) / radius**2).unsqueeze(-1)


class IntoBall(torch.autograd.Function):
    """ψ_R, in float32 at least; autograd's own gradient passes over the tokens twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> Tensor:
        """x ρ."""
        ctx.save_for_backward(x)
        ctx.radius = radius
        return x * shrinkage(x, radius)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """ρ (g − x (x·g) ρ²/R²), computed in one format: under autocast g may come in another."""
        (x,) = ctx.saved_tensors
        dtype, x, g = x.dtype, at_least_single(x), at_least_single(gradients[0])
        with without_autocast(x.device):
            rho = shrinkage(x, ctx.radius)
            along = torch.linalg.vecdot(x, g).unsqueeze(-1) * rho.square() / ctx.radius**2
            return (rho * torch.addcmul(g, x, along, value=-1)).to(dtype), None
