"""The inverse as a differentiable function, by the implicit function theorem."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from invformer.numerics.fixed_point import invert_residual
from invformer.numerics.linear_map import SequenceMap, linearise
from invformer.numerics.norms import Norm


def implicit_inverse(
    f: SequenceMap,
    y: Float[Tensor, "*batch tokens width"],
    *,
    lipschitz_bound: float | None,
    norm: Norm,
    adjoint_rtol: float | None = None,
    **options: Any,
) -> Float[Tensor, "*batch tokens width"]:
    """x with x + f(x) = y, differentiable in y and in whatever f was computed from.

        ∂x/∂y = (I + J)⁻¹,   ∂x/∂θ = −(I + J)⁻¹ ∂f/∂θ,   J = ∂f/∂x at x

    The backward pass solves (I + Jᵀ) u = g for the incoming gradient g with the same engine. No
    step of the forward solve is stored or differentiated. First derivatives only. The gradient is
    exact up to both tolerances: an error ε in x changes it by O(ε).

    Args:
        f: as for :func:`.fixed_point.invert_residual`, built of differentiable operations; fused
            attention has no second derivative, use the plain form.
        y: what to invert.
        lipschitz_bound: c < 1, or None.
        norm: the norm of c. For ``frobenius`` c bounds Jᵀ too and the backward pass checks it; the
            other norms' duals are not among those the engine measures in, so there CONVERGED in the
            backward pass speaks of the residual of u.
        adjoint_rtol: tolerance of the backward solve, relative to ‖u‖; None takes the default.
        options: passed to :func:`.fixed_point.invert_residual`, except ``throw`` and ``polish``.

    Returns:
        x, in the dtype of y.

    Raises:
        FixedPointError: either solve failed; a wrong gradient is never returned.
        ValueError: ``throw`` or ``polish`` was passed, or an argument is impossible.

    Source: implicit differentiation as in Bai, Kolter & Koltun 2019, arXiv 1909.01377, Theorem 1.
    """
    for refused in {"throw", "polish"} & options.keys():
        raise ValueError(f"implicit_inverse does not take {refused}: it always raises on failure")
    x = invert_residual(f, y.detach(), lipschitz_bound=lipschitz_bound, norm=norm, **options).value
    # y − f(x) equals x and carries the graph to y and to the weights inside f.
    image = y - f(x)
    solved: Tensor = _Inverse.apply(image, x, f, lipschitz_bound, norm, adjoint_rtol)
    return solved


class _Inverse(torch.autograd.Function):
    """Forward: x. Backward: (I + Jᵀ)⁻¹ applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, x: Tensor, f: SequenceMap, *claims: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.f, ctx.claims = f, claims
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        lipschitz_bound, norm, rtol = ctx.claims
        jacobian = linearise(ctx.f, x)
        adjoint = invert_residual(
            jacobian.vjp,
            gradients[0],
            lipschitz_bound=lipschitz_bound if norm == "frobenius" else None,
            norm="frobenius",
            method="anderson",
            rtol=rtol,
        )
        return adjoint.value, None, None, None, None, None
