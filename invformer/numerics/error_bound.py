"""A posteriori bounds on the error of an approximate inverse, found by any method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.norms import Norm, Tokens, norm_upper
from invformer.numerics.precision import at_least_single, unit_roundoff

# Headroom over a rounding error that was measured at one point, elsewhere.
FROM_POINT_TO_POINT = 4


def contraction_error_bound(residual: Float[Tensor, "..."], lipschitz_bound: float) -> Tensor:
    """‖x̂ − x*‖ ≤ ‖y − x̂ − f(x̂)‖ / (1 − c) for any x̂, if Lip(f) ≤ c < 1 in the same norm.

    x̂ − x* = −r − (f(x̂) − f(x*)) with r = y − x̂ − f(x̂), so ‖x̂ − x*‖ ≤ ‖r‖ + c ‖x̂ − x*‖.
    Rounded outward in float64; the residual must include its own rounding. Infinite unless c < 1.
    """
    if not lipschitz_bound < 1:  # nor where it is NaN
        return torch.full_like(residual, math.inf, dtype=torch.float64)
    outward = 1 + 4 * torch.finfo(torch.float64).eps
    return residual.double() / (1 - lipschitz_bound) * outward


@dataclass(frozen=True)
class RoundingModel:
    """How far computed values are from exact ones: a model, not a theorem.

        ‖fl(f(x)) − f(x)‖ ≤ k u s,   k = 4 √(N + D),   s = ‖x‖ + ‖f(x)‖ + inner_size + √(N D t)

    Sums of m terms of random signs err by about √m u (Higham & Mary 2019, SIAM J. Sci. Comput. 41,
    Theorem 2.4); a branch sums over at most N tokens and a few D channels, and 4 is headroom. √t,
    with t the smallest normal number, covers underflow. Logits far larger than x and f(x) are not
    covered. The gap between f in the working format and in float64 measures the working rounding.
    """

    tokens: int  # N
    width: int  # D
    # Length of the terms that f adds up inside, whatever x is, where they may exceed ‖x‖ and ‖f(x)‖
    # (biases that cancel).
    inner_size: float
    working: torch.dtype  # of iterates and of the forward pass
    measured: torch.dtype | None  # of the residual; None if no error is to be bounded

    @property
    def factor(self) -> float:
        """k."""
        return 4 * math.sqrt(self.tokens + self.width)

    @property
    def relative(self) -> float:
        """k u of the residual, or zero if that is not measured."""
        return self.factor * unit_roundoff(self.measured) if self.measured else 0.0

    @property
    def underflow(self) -> float:
        """√(N D t)."""
        return math.sqrt(self.tokens * self.width * torch.finfo(self.working).tiny)

    def rounded(self, size: Tensor) -> Tensor:
        """u s of the working format, from size = ‖x‖ + ‖f(x)‖."""
        return unit_roundoff(self.working) * (size + self.inner_size + self.underflow)

    def of_step(self, size: Tensor) -> Tensor:
        """≥ the rounding of f(x) − f(x′) in the working format, for the size of both together."""
        return 2 * self.factor * self.rounded(size / 2)

    def of_residual(self, size: Tensor, gap: Tensor | float) -> Tensor:
        """≥ the rounding of y − x − f(x), for size = ‖x‖ + ‖f(x)‖ + ‖y‖."""
        assert self.measured is not None
        finer = unit_roundoff(self.measured) / unit_roundoff(self.working)
        return finer * (self.factor * self.rounded(size) + 16 * gap)

    def of_output(self, size: Tensor, gap: Tensor | float) -> Tensor:
        """≥ ‖y − (x + f(x))‖ for the x that the forward pass took to y, for the same size."""
        if self.working == self.measured:
            return self.of_residual(size, gap)
        return FROM_POINT_TO_POINT * (gap + self.rounded(size))


class ErrorStep(NamedTuple):
    """How one inverse layer passes an error on: E ↦ amplification · E + added; on the processor."""

    amplification: float  # constant of the inverse layer in the norm of the bound
    added: Tensor | float  # error of the layer's own inverse, per sample
    log_scale: Float[Tensor, "width"] | None = None  # s, where the layer is y = x · e^s + b
    lipschitz_bound: float = 0.0  # c, where it is y = x + f(x)


def residual_step(error_bound: Tensor, lipschitz_bound: float) -> ErrorStep:
    """Inverting y = x + f(x) up to ``error_bound``: 1/(1 − c)-Lipschitz; unbounded unless c < 1."""
    if not lipschitz_bound < 1:
        return ErrorStep(math.inf, math.inf)
    amplification = (1 + 2.0**-50) / (1 - lipschitz_bound)
    return ErrorStep(amplification, error_bound, lipschitz_bound=lipschitz_bound)


def scale_step(
    y: Tokens,
    log_scale: Float[Tensor, "width"],
    shift: Float[Tensor, "width"],
    norm: Norm,
) -> ErrorStep:
    """Inverting y = x · e^s + b by (y − b) · e^{−s}: errors grow by at most max_k e^{−s_k}.

    True in each of the three norms. Both directions together round six times, the exponentials to
    within two units, hence 16 u (‖y‖ + ‖b‖) on top.
    """
    scales = log_scale.detach().double().cpu()
    amplification = float(scales.min().neg().exp()) * (1 + 2.0**-20)
    size = norm_upper(at_least_single(y).abs() + shift.abs(), norm)
    rounded = 16 * unit_roundoff(log_scale.dtype) * size
    return ErrorStep(amplification, amplification * rounded, scales)


def stack_error_bound(steps: Sequence[ErrorStep]) -> Tensor:
    """Bound on the error of a whole stack's recovered input, from the top layer down.

        E_l = e_l + Q_l,  Q_l = E_{l+1} / (1 − c_l)    for a residual layer,
        E_l = e_l + max_k e^{−s_k} E_{l+1}             for y = x · e^s + b,

    or the next bound if that is smaller: the error is a sum of vectors d, one from each layer
    above, and ‖e^S d‖ ≤ r is known of each, S the scales at that layer (docs/numerics.md §18).

    The steps are in the order they were applied, all in one norm; each residual layer's own bound
    is for the y it was given. There is one bound per sample (for an empty stack a scalar, 0).
    """
    error = torch.zeros((), dtype=torch.float64)
    scales = torch.zeros(1, dtype=torch.float64)  # relative to those at the top
    parts: list[tuple[Tensor, Tensor]] = []  # (S, r): a part d with ‖e^S d‖ ≤ r
    outward = 1 + 2.0**-40  # of exponentials and sums of parts
    for step in steps:
        # Nothing is proven below a layer that amplifies without bound, not even of no error.
        known = step.amplification < math.inf
        carried = step.amplification * error if known else torch.full_like(error, math.inf)
        added = torch.as_tensor(step.added, dtype=torch.float64)
        if step.log_scale is not None:
            # Its rounding is relative to each channel of y, so in the scales of y.
            parts.append((scales, added / step.amplification))
            scales = scales - step.log_scale
            at, radii = (
                torch.stack(torch.broadcast_tensors(*of)) for of in zip(*parts, strict=True)
            )
            in_parts = torch.tensordot((scales - at).amax(-1).exp(), radii, 1)
            error = torch.fmin(carried + added, in_parts * outward)
        else:
            error = carried + added
            new_part = added + step.lipschitz_bound * carried if known else carried
            parts.append((scales, new_part))
    error = error.nan_to_num(math.inf, math.inf)  # nothing is known of what is no number
    return error * (1 + 2.0**-50 * max(len(steps), 1))
