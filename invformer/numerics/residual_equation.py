"""The equation y = x + f(x) of a fixed-point iteration: when it is solved, and how well."""

import math
from typing import Literal

import torch
from torch import Tensor

from invformer.numerics.error_bound import (
    FROM_POINT_TO_POINT,
    RoundingModel,
    contraction_error_bound,
)
from invformer.numerics.fixed_point_solution import InversionStatus
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Norm, norm_upper, vector_norm
from invformer.numerics.precision import RESIDUAL_FLOOR, at_least_single

Kind = Literal["global", "causal"]

LEAST_DEFAULT_RTOL = 1e-10
STEPS_WITHOUT_PREDICTION = 1_000
MOST_PREDICTED_STEPS = 10_000


class ResidualEquation:
    """y = x + f(x): the constant of f, and the tolerance.

    ``exact`` is f in float64 where y is in less; the other arguments are those of
    :func:`.invert_residual`.
    """

    def __init__(
        self,
        exact: SequenceMap | None,
        rounding: RoundingModel,
        norm: Norm,
        kind: Kind,
        lipschitz_bound: float | None,
        atol: float,
        rtol: float | None,
    ) -> None:
        self.exact, self.rounding, self.atol = exact, rounding, atol
        self.norm: Norm = norm
        c = lipschitz_bound or 0.0
        self.one_minus_c = 1 - c  # one if nothing is proven: error = residual / (1 − c)
        self.global_bound = lipschitz_bound if kind == "global" else None  # c of whole steps
        floor = RESIDUAL_FLOOR[rounding.working] + 3 * rounding.relative
        self.least_rtol = floor / self.one_minus_c
        self.rtol = comfortable_rtol(self.least_rtol, c) if rtol is None else rtol
        # No less than what `measure` charges a solution of zeros: by norm_upper, and as rounding.
        in_norm = math.sqrt(rounding.tokens * rounding.width * torch.finfo(torch.float64).tiny)
        self.underflow = 2 * (in_norm + rounding.relative * rounding.underflow)

    def unreachable(self, size: Tensor) -> Tensor:
        """True if no answer of this size in the format of y can meet the tolerance."""
        inner = self.rounding.relative * self.rounding.inner_size / self.one_minus_c
        return self.atol + self.rtol * size < self.least_rtol * size + inner

    def sizes(self, *xs: Tensor) -> Tensor:
        """‖x‖ of every row of each x, (xs, rows) in float64.

        On the processor, where verdicts are made: one call waits for the device once.
        """
        sizes = torch.stack([vector_norm(at_least_single(x), self.norm) for x in xs])
        return sizes.double().cpu()

    def within_tolerance(self, residual: Tensor, size: Tensor) -> Tensor:
        """True if residual/(1 − c) ≤ atol + rtol ‖x‖, up to underflow; False for NaN."""
        return residual <= self.one_minus_c * (self.atol + self.rtol * size) + self.underflow

    def predicted_steps(self, residual: Tensor, size: Tensor) -> Tensor | int:
        """Twice the steps that c allows for, and ten, from ‖r₀‖ and ‖x‖: cᵏ ‖r₀‖ ≤ (1 − c) τ/4."""
        c = self.global_bound
        if c is None:
            return STEPS_WITHOUT_PREDICTION
        ratio = self.one_minus_c * (self.atol + self.rtol * size) / 4 / residual
        steps = ratio.log() / math.log(max(c, 1e-300))
        return 2 * steps.nan_to_num(0).ceil().clamp(0, MOST_PREDICTED_STEPS).long() + 10

    def disproves(self, step: Tensor, change: Tensor, x: Tensor, fx: Tensor) -> Tensor:
        """True if ``change`` = ‖f(x) − f(x′)‖ > c ‖x − x′‖ beyond rounding, ``step`` = ‖x − x′‖."""
        c = self.global_bound
        if c is None:
            return torch.zeros_like(step, dtype=torch.bool)
        excess = change - c * step
        if bool((excess > 0).any()):
            excess -= self.rounding.of_step(2 * self.sizes(x, fx).sum(0) + step + change)
        if self.exact is not None and bool((excess > 0).any()):
            (gap,) = self.sizes(fx.double() - self.exact(x.double()))
            excess -= 2 * FROM_POINT_TO_POINT * gap
        return excess > 0

    def measure(self, y: Tensor, x: Tensor, fx: Tensor) -> Tensor:
        """‖y − x − f(x)‖ of every sample, its own rounding, and the rounding of y."""
        if self.rounding.measured is None:
            (residual,) = self.sizes(y - x - fx)
            unknown = torch.zeros_like(residual)
            return torch.stack([residual, unknown, unknown])
        value, gap = fx.double(), 0.0
        if self.exact is not None:
            value = self.exact(x.double())
            (gap,) = self.sizes(fx.double() - value)
        residual = norm_upper(y.double() - x.double() - value, self.norm)
        size = self.sizes(x, fx, y).sum(0)
        return torch.stack(
            [residual, self.rounding.of_residual(size, gap), self.rounding.of_output(size, gap)]
        )

    def error_bound(self, residual: Tensor, status: Tensor) -> Tensor:
        """≥ ‖x̂ − x‖ from the residual and all rounding; inf for samples that failed."""
        c = self.global_bound
        if c is None or self.rounding.measured is None:
            c = math.inf
        bound = contraction_error_bound(residual, c)
        return bound.masked_fill(status != InversionStatus.CONVERGED, math.inf)


def comfortable_rtol(smallest: float, c: float) -> float:
    """A relative error that can be met with room to spare where ``smallest`` can just be met."""
    # Each step rounds, and J passes it on: together √(1 + c² + c⁴ + …) times one step's rounding.
    return max(LEAST_DEFAULT_RTOL, 8 * smallest / math.sqrt(1 - c * c))
