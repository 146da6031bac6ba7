"""A posteriori bounds: how far an approximate inverse can be from the truth, whatever found it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.norms import Norm, vector_norm
from invformer.numerics.precision import unit_roundoff


def contraction_error_bound(residual: Float[Tensor, "..."], lipschitz_bound: float) -> Tensor:
    """‖x̂ − x*‖ ≤ ‖y − x̂ − f(x̂)‖ / (1 − c) for any x̂, if Lip(f) ≤ c < 1 in the same norm.

    x̂ − x* = −r − (f(x̂) − f(x*)) with r = y − x̂ − f(x̂), so ‖x̂ − x*‖ ≤ ‖r‖ + c ‖x̂ − x*‖.
    Rounded outward; the residual must already contain the rounding of its own evaluation.

    Args:
        residual: ‖y − x̂ − f(x̂)‖ plus rounding, in the norm c is stated in.
        lipschitz_bound: c ≥ 0.

    Returns:
        The bound, float64, shaped like the residual; inf unless c < 1.
    """
    if not lipschitz_bound < 1:  # nor where it is NaN
        return torch.full_like(residual, math.inf, dtype=torch.float64)
    outward = 1 + 4 * torch.finfo(torch.float64).eps
    return residual.double() / (1 - lipschitz_bound) * outward


def causal_error_bound(
    token_residual: Float[Tensor, "*batch tokens"],
    lipschitz_bound: float,
    off_diagonal_bound: float | Float[Tensor, "tokens tokens"],
) -> Float[Tensor, "*batch tokens"]:
    """Bounds e_i ≥ ‖x̂_i − x*_i‖ of every token of a causal map, by recursion over time.

        e_i = (‖r_i‖ + L max_{j<i} e_j) / (1 − c)          (``off_diagonal_bound`` a number L)
        e_i = (‖r_i‖ + Σ_{j<i} L_ij e_j) / (1 − c)         (a matrix L_ij)

    because x̂_i − x*_i = −r_i − a_i − b_i, where a_i = f_i(x̂_{<i}, x̂_i) − f_i(x̂_{<i}, x*_i) is at
    most c ‖x̂_i − x*_i‖ and b_i = f_i(x̂_{<i}, x*_i) − f_i(x*_{<i}, x*_i) at most L max_{j<i} e_j.
    If L < 1 − c they stay below max‖r‖/(1 − c − L); otherwise they may grow like (L/(1 − c))^i,
    and so may the truth: c alone bounds no error, however small the residual.

    Args:
        token_residual: ‖y_i − x̂_i − f_i(x̂)‖ plus rounding, in the norm of one token.
        lipschitz_bound: c ≥ 0, constant of x_i ↦ f_i(x_{<i}, x_i) for every fixed past.
        off_diagonal_bound: L, constant of x_{<i} ↦ f_i from max_{j<i} ‖x_j‖ to the norm of one
            token, for every i; or L_ij, constant of x_j ↦ f_i with everything else fixed.

    Returns:
        One bound per token, inf unless c < 1. Cost O(N) for a number, O(N²) for a matrix.

    Source: ours, docs/numerics.md.
    """
    residual = token_residual.double()
    if not lipschitz_bound < 1:
        return torch.full_like(residual, math.inf)
    outward = (1 + 8 * torch.finfo(torch.float64).eps) / (1 - lipschitz_bound)
    errors: list[Tensor] = []
    largest = torch.zeros_like(residual[..., 0])
    for i in range(residual.shape[-1]):
        if isinstance(off_diagonal_bound, Tensor):
            row = off_diagonal_bound[i, :i].to(residual)
            inherited = (torch.stack(errors, -1) @ row if errors else largest) * (1 + i * 2.0**-52)
        else:
            inherited = off_diagonal_bound * largest
        errors.append((residual[..., i] + inherited) * outward)
        largest = torch.maximum(largest, errors[-1])
    return torch.stack(errors, -1)


class ErrorStep(NamedTuple):
    """How one inverse layer passes an error on: E ↦ amplification · E + added.

    Attributes:
        amplification: constant of the inverse layer in the norm of the bound.
        added: what the layer's own inexact inverse adds, per sample.
        log_scale: s, where the layer is y = x · e^s + b.
        lipschitz_bound: c, where it is y = x + f(x).
    """

    amplification: float
    added: Tensor | float
    log_scale: Float[Tensor, "width"] | None = None
    lipschitz_bound: float = 0.0


def residual_step(error_bound: Tensor, lipschitz_bound: float) -> ErrorStep:
    """Inverting y = x + f(x): the inverse is 1/(1 − c)-Lipschitz, and was found up to its bound.

    Unless c < 1 there need not be an inverse, and no error is bounded.
    """
    if not lipschitz_bound < 1:
        return ErrorStep(math.inf, math.inf)
    amplification = (1 + 2.0**-50) / (1 - lipschitz_bound)
    return ErrorStep(amplification, error_bound, lipschitz_bound=lipschitz_bound)


def scale_step(
    y: Float[Tensor, "*batch tokens width"],
    log_scale: Float[Tensor, "width"],
    shift: Float[Tensor, "width"],
    norm: Norm,
) -> ErrorStep:
    """Inverting y = x · e^s + b by (y − b) · e^{−s}: errors grow by at most max_k e^{−s_k}.

    True in each of the three norms. Both directions together round six times, the exponentials to
    within two units, hence 16 u (‖y‖ + ‖b‖) on top.

    Args:
        y: what was inverted, in the precision both directions ran in.
        log_scale: s.
        shift: b.
        norm: the norm of the bound.
    """
    amplification = math.exp(-float(log_scale.min())) * (1 + 2.0**-20)
    y = y if y.dtype == torch.float64 else y.float()
    tokens = token_norm(y.abs().add_(shift.abs()), norm).double()
    outward = 1 + (y.shape[-1] + 8) * unit_roundoff(y.dtype)  # of the lengths themselves
    rounded = 16 * unit_roundoff(log_scale.dtype) * outward * sequence_norm(tokens, norm)
    return ErrorStep(amplification, amplification * rounded, log_scale.detach().double())


class ErrorPart(NamedTuple):
    """A part d of an error with ‖e^{S} d‖ ≤ radius, S the scales of where it came in."""

    log_scales: Tensor
    radius: Tensor

    def length(self, log_scales: Tensor) -> Tensor:
        """A bound on ‖e^{S'} d‖: its length where channels are scaled by S'."""
        return (log_scales - self.log_scales).max().exp() * self.radius


def stack_error_bound(steps: Sequence[ErrorStep]) -> Tensor:
    """Bound on the error of a whole stack's recovered input, from the top layer down.

        E_l = e_l + Q_l,  Q_l = E_{l+1} / (1 − c_l)    for a residual layer,
        E_l = e_l + max_k e^{−s_k} E_{l+1}             for y = x · e^s + b,

    or less: the error is a sum of parts, one from every layer above, and none of them grows but
    with the scales of the channels. A residual layer takes y − y* to y − y* − (f(x) − f(x*)), so it
    leaves all parts as they are and adds one of at most c_l Q_l, in the scales of its own
    coordinates; E is at most the sum of what the parts are long in those of the next one.

    One norm throughout. Each residual layer's own bound must be for the y it was given; errors of
    that y are what the recursion carries.

    Args:
        steps: the inverse layers in the order they were applied, top of the stack first.

    Returns:
        One bound per sample (a scalar tensor for an empty stack: 0).
    """
    error = torch.zeros((), dtype=torch.float64)
    scales = torch.zeros((), dtype=torch.float64)  # relative to those at the top
    parts: list[ErrorPart] = []
    outward = 1 + 2.0**-40  # of exponentials and sums of parts
    for step in steps:
        # Nothing is proven below a layer that amplifies without bound, not even of no error.
        known = step.amplification < math.inf
        carried = step.amplification * error if known else torch.full_like(error, math.inf)
        added = torch.as_tensor(step.added, dtype=torch.float64)
        if step.log_scale is not None:
            # What it rounds is as large as it is in each channel of y, so in the scales of y.
            parts.append(ErrorPart(scales, added / step.amplification))
            scales = scales - step.log_scale
            in_parts = sum((part.length(scales) for part in parts), torch.zeros_like(error))
            error = torch.fmin(carried + added, in_parts * outward)
        else:
            error = carried + added
            new_part = added + step.lipschitz_bound * carried if known else carried
            parts.append(ErrorPart(scales, new_part))
    return error * (1 + 2.0**-50 * max(len(steps), 1))


def token_norm(
    x: Float[Tensor, "*batch tokens width"], norm: Norm
) -> Float[Tensor, "*batch tokens"]:
    """‖x_i‖ of every token: the largest entry for ``entry_max``, the Euclidean length otherwise."""
    return vector_norm(x.unsqueeze(-2), norm)


def sequence_norm(
    token_norms: Float[Tensor, "*batch tokens"], norm: Norm
) -> Float[Tensor, "*batch"]:
    """The norm of a sequence from those of its tokens."""
    return vector_norm(token_norms.unsqueeze(-1), norm)
