"""The smooth map into a ball: ψ_R(x) = x/√(1 + ‖x‖²/R²) = R ψ(x/R), the identity near zero.

Its Jacobian at x is ρ (I − uuᵀ) with u = ψ(x/R) in the open unit ball and ρ = √(1 − ‖u‖²), whose
norm is ρ ≤ 1: ψ_R never moves two points apart, and hardly moves what lies near the sphere.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


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


def into_ball(
    x: Float[Tensor, "*batch tokens width"], radius: float
) -> Float[Tensor, "*batch tokens width"]:
    """ψ_R(x), for training: few passes over the tokens.

    Args:
        x: tokens.
        radius: R > 0.

    Returns:
        ‖ψ_R(x)‖₂ < R for every token.
    """
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        mapped: Tensor = IntoBall.apply(x, radius)
        return mapped
    return x * shrinkage(x, radius)


def shrinkage(
    x: Float[Tensor, "*batch tokens width"], radius: float
) -> Float[Tensor, "*batch tokens 1"]:
    """ρ = 1/√(1 + ‖x‖²/R²)."""
    return torch.rsqrt(1 + torch.linalg.vecdot(x, x) / radius**2).unsqueeze(-1)


class IntoBall(torch.autograd.Function):
    """ψ_R; what autograd makes of it passes over the tokens twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> Tensor:
        """x ρ."""
        ctx.save_for_backward(x)
        ctx.radius = radius
        return x * shrinkage(x, radius)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """ρ (g − x (x·g) ρ²/R²)."""
        (g,) = gradients
        (x,) = ctx.saved_tensors
        rho = shrinkage(x, ctx.radius)
        along = torch.linalg.vecdot(x, g).unsqueeze(-1) * rho.square() / ctx.radius**2
        return rho * torch.addcmul(g, x, along, value=-1), None
