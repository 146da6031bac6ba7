"""Invert y = x + f(x) for a contraction f, with a bound on the error of every sample.

    x ← y − f(x),    ‖x̂ − x*‖ ≤ (‖y − x̂ − f(x̂)‖ + rounding) / (1 − c)

Source: Behrmann et al. 2019, arXiv 1811.00995, Algorithm 1 and Theorem 1.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.numerics.error_bound import (
    FROM_POINT_TO_POINT,
    ErrorStep,
    RoundingModel,
    contraction_error_bound,
)
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Norm, norm_upper, vector_norm
from invformer.numerics.precision import RESIDUAL_FLOOR, at_least_single

Kind = Literal["global", "causal"]

RUNNING = -1
LEAST_DEFAULT_RTOL = 1e-10
STEPS_WITHOUT_PREDICTION = 1_000
MOST_PREDICTED_STEPS = 10_000


class InversionStatus(IntEnum):
    """The verdict on one sample.

    CONVERGED: (‖y − x̂ − f(x̂)‖ + rounding)/(1 − c) ≤ atol + rtol ‖x̂‖.
    MAX_STEPS: the steps ran out first.
    NONFINITE: y, f or the residual contains NaN or infinity.
    NOT_CONTRACTIVE: ‖f(x) − f(x′)‖ > c ‖x − x′‖ was seen, beyond rounding: c is disproved.
    TOLERANCE_BELOW_PRECISION: no answer in this format can meet the tolerance; nothing was tried.
    """

    CONVERGED = 0
    MAX_STEPS = 1
    NONFINITE = 2
    NOT_CONTRACTIVE = 3
    TOLERANCE_BELOW_PRECISION = 4


ADVICE = {
    InversionStatus.MAX_STEPS: "raise max_steps, loosen the tolerance, or certify f in this norm",
    InversionStatus.NONFINITE: "look for NaN or infinity in y and in the weights of f",
    InversionStatus.NOT_CONTRACTIVE: "the iterates disprove lipschitz_bound: certify the weights "
    "that f runs with, in this norm",
    InversionStatus.TOLERANCE_BELOW_PRECISION: "loosen the tolerance or pass float64 tensors",
}


@dataclass(frozen=True, kw_only=True)
class FixedPointSolution:
    """An approximate inverse x̂ and how far it can be from the truth; every field is per sample.

    Attributes:
        value: x̂, (*batch, N, D).
        residual: ‖y − x̂ − f(x̂)‖.
        error_bound: ≥ ‖x̂ − x‖ for the x that a forward pass took to y, by the rounding model; inf
            without a constant, or if it is disproved or one of diagonal blocks.
        num_steps: Picard steps taken.
        num_evaluations: evaluations of f, measurement included.
        status: an :class:`InversionStatus`.
        norm: the norm of residual, bound and tolerance.
        error_steps: how a layer's inverse passes errors on, for :func:`.stack_error_bound`.
    """

    value: Float[Tensor, "*batch tokens width"]
    residual: Float[Tensor, "*batch"]
    error_bound: Float[Tensor, "*batch"]
    num_steps: Int[Tensor, "*batch"]
    num_evaluations: Int[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]
    norm: Norm
    error_steps: tuple[ErrorStep, ...] = field(default=(), repr=False)

    @property
    def converged(self) -> Tensor:
        """Which samples are CONVERGED."""
        return self.status == InversionStatus.CONVERGED

    def failure(self) -> str | None:
        """One line: how many failed, how badly, what to try; None if every sample converged."""
        failed = ~self.converged
        if not failed.any():
            return None
        count = [(status, int((self.status == status).sum())) for status in ADVICE]
        kinds = [(status, n) for status, n in count if n]
        worst = self.residual[failed].nan_to_num(math.inf, math.inf).max()
        return (
            f"{int(failed.sum())} of {failed.numel()} samples were not inverted "
            f"({', '.join(f'{n} {status.name}' for status, n in kinds)}): worst residual "
            f"{float(worst):.1e} in {self.norm} after {int(self.num_steps.max())} steps. "
            + "; ".join(ADVICE[status] for status, _ in kinds)
        )


class FixedPointError(RuntimeError):
    """Some samples could not be inverted; ``solution`` has their verdicts."""

    def __init__(self, solution: FixedPointSolution) -> None:
        super().__init__(solution.failure())
        self.solution = solution


@torch.no_grad()
def invert_residual(
    f: SequenceMap,
    y: Float[Tensor, "*batch tokens width"],
    *,
    lipschitz_bound: float | None,
    norm: Norm,
    kind: Kind = "global",
    atol: float = 0.0,
    rtol: float | None = None,
    max_steps: int | None = None,
    residual_map: SequenceMap | None = None,
    inner_size: float = 0.0,
    token_wise: bool = False,
    evidence: bool = True,
    throw: bool = True,
) -> FixedPointSolution:
    """x̂ ≈ x* with x* + f(x*) = y, by x ← y − f(x) from x = y, with a bound on ‖x̂ − x*‖.

    A sample leaves the batch with its verdict, so its answer does not depend on the others beyond
    the rounding of f itself. Nothing is recorded for gradients.

    Args:
        f: acts on each sample of (samples, N, D) separately.
        y: the tensor to invert; its dtype is the precision of the iterates and of the forward pass.
        lipschitz_bound: a proven c < 1 in ``norm``; None if nothing is proven: the error bound is
            then infinite, and CONVERGED is about the residual only.
        norm: the norm of c, of the tolerance and of every reported length.
        kind: ``global`` if c bounds Lip(f); ``causal`` if it bounds x_i ↦ f_i(x_{<i}, x_i)
            for every fixed past. The iteration then converges from every start, too, but c is not
            tested by whole steps, and a small residual bounds no error.
        atol: error allowed, in units of x.
        rtol: error allowed relative to ‖x̂‖; None takes 1e-10, or more if the format of y needs it.
        max_steps: None takes twice what c predicts and ten, or a thousand without a global c.
        residual_map: f in float64, to measure the residual of a y in less; None measures it in the
            format of y.
        inner_size: length of the terms that f adds up inside, for :class:`.RoundingModel`.
        token_wise: f maps every token by itself. A token that has converged is then not evaluated
            again, except in ``frobenius``.
        evidence: measure the residual in float64 and bound the error. False saves one evaluation:
            CONVERGED is about the residual in y's format, and ``error_bound`` is infinite.
        throw: raise if any sample fails; otherwise ``status`` says so.

    Raises:
        FixedPointError: ``throw`` and some sample did not converge.
        ValueError: an argument is impossible.
    """
    require_invertible(y, lipschitz_bound)
    exact = residual_map if evidence and y.dtype != torch.float64 else None
    measured_in = (y.dtype if exact is None else torch.float64) if evidence else None
    rounding = RoundingModel(y.shape[-2], y.shape[-1], inner_size, y.dtype, measured_in)
    eq = _Equation(exact, rounding, norm, kind, lipschitz_bound, atol, rtol)
    samples = y.detach().reshape(-1, *y.shape[-2:])
    rows = _Rows(f, eq, samples, token_wise and norm != "frobenius", max_steps)
    while bool(rows.unverified.any()):
        while count := int(rows.running.sum()):
            rows.step(count)  # x ← y − f(x), in y's format
        rows.verify()  # in float64
    solution = rows.solution(y.shape)
    if throw and not bool(solution.converged.all()):
        raise FixedPointError(solution)
    return solution


def require_invertible(y: Tensor, lipschitz_bound: float | None) -> None:
    """Raise ValueError unless y is a tensor to invert and c a constant below one, or None."""
    if y.ndim < 2 or y.numel() == 0 or y.dtype not in RESIDUAL_FLOOR:
        raise ValueError(
            f"y must be floating point (*batch, N, D) and not empty, got {y.dtype} {tuple(y.shape)}"
        )
    if lipschitz_bound is not None and not 0 <= lipschitz_bound < 1:
        raise ValueError(
            f"lipschitz_bound must be in [0, 1), got {lipschitz_bound}: scale f down, or pass None "
            "and get no error bound"
        )


class _Rows:
    """Rows that converge independently: samples, or single tokens of a token-wise f."""

    def __init__(
        self,
        f: SequenceMap,
        eq: "_Equation",
        samples: Tensor,
        tokens_apart: bool,
        max_steps: int | None,
    ) -> None:
        """Start at x = y."""
        self.f, self.eq, self.samples = f, eq, samples
        self.per_sample = samples.shape[-2] if tokens_apart else 1
        self.y = samples.reshape(len(samples) * self.per_sample, -1, samples.shape[-1])
        fx = f(samples)
        if fx.shape != samples.shape or fx.dtype != samples.dtype:
            advice = "; call it outside torch.autocast" if fx.dtype != samples.dtype else ""
            raise ValueError(
                f"f maps {samples.dtype} {tuple(samples.shape)} to {fx.dtype} {tuple(fx.shape)}: "
                f"it must keep dtype and shape{advice}"
            )
        self.x, self.fx = self.y.clone(), fx.reshape(self.y.shape).clone()
        length = eq.size(samples)
        unreachable = eq.unreachable(length)
        status = torch.where(unreachable, InversionStatus.TOLERANCE_BELOW_PRECISION, RUNNING)
        self.status = status.repeat_interleave(self.per_sample)
        self.length = length.repeat_interleave(self.per_sample)
        self.residual, self.num_steps = eq.size(self.fx), torch.zeros_like(self.status)
        limit = eq.predicted_steps(self.residual, self.length) if max_steps is None else max_steps
        self.limit = torch.zeros_like(self.status) + limit
        # Of every sample: the residual, its rounding, and the rounding of y.
        self.errors = torch.zeros(3, len(samples), dtype=torch.float64, device=samples.device)
        self.num_measurements = torch.ones_like(status)
        self.unverified = torch.ones_like(unreachable)

    @property
    def running(self) -> Tensor:
        """Which rows go on."""
        return self.status == RUNNING

    def by_sample(self, rows: Tensor) -> Tensor:
        """The largest entry of every sample's rows."""
        return rows.view(-1, self.per_sample).amax(1)

    def step(self, count: int) -> None:
        """x ← y − f(x) in the running rows, which are ``count``, and their verdicts."""
        rows = slice(None) if count == len(self.x) else self.running.nonzero().squeeze(-1)
        fx_before = self.fx[rows]
        x = self.y[rows] - fx_before
        fx = self.f(x)
        residual = self.eq.size(fx - fx_before)  # ‖y − x − f(x)‖, the length of the next step
        disproved = self.eq.disproves(self.residual[rows], residual, x, fx)
        self.x[rows], self.fx[rows] = x, fx
        self.residual[rows], self.length[rows] = residual, self.eq.size(x)
        self.num_steps[rows] += 1
        self.judge(rows, disproved)

    def judge(self, rows: slice | Tensor, disproved: Tensor) -> None:
        """The status of some rows after a step; ``disproved`` says where c is."""
        residual = self.residual[rows]
        longest = self.by_sample(self.length).repeat_interleave(self.per_sample)[rows]
        verdict = self.status[rows]
        for outcome, applies in (  # of several the last one counts
            (InversionStatus.MAX_STEPS, self.num_steps[rows] >= self.limit[rows]),
            (InversionStatus.CONVERGED, self.eq.within_tolerance(residual, longest)),
            (InversionStatus.NOT_CONTRACTIVE, disproved),
            (InversionStatus.NONFINITE, ~(residual + longest < math.inf)),
        ):
            verdict = verdict.masked_fill(applies, outcome)
        self.status[rows] = verdict

    def verify(self) -> None:
        """Measure the residuals of unverified samples; let those go on where it is too large.

        A residual that is small in y's format may be larger in float64.
        """
        x, fx = self.x.view_as(self.samples), self.fx.view_as(self.samples)
        chosen = slice(None) if bool(self.unverified.all()) else self.unverified
        self.errors[:, chosen] = self.eq.measure(self.samples[chosen], x[chosen], fx[chosen])
        self.num_measurements += self.unverified & (self.eq.exact is not None)
        accurate = self.eq.within_tolerance(self.errors[:2].sum(0), self.eq.size(x))
        status = self.status.view(-1, self.per_sample)
        inaccurate = self.unverified & ~accurate & (status == InversionStatus.CONVERGED).all(1)
        out_of_steps = (self.num_steps >= self.limit).view_as(status).any(1)
        status[inaccurate & out_of_steps] = InversionStatus.MAX_STEPS
        self.unverified = inaccurate & ~out_of_steps
        status[self.unverified] = RUNNING

    def solution(self, shape: torch.Size) -> FixedPointSolution:
        """The answer and its evidence, for a y of this shape."""
        status, num_steps = self.by_sample(self.status), self.by_sample(self.num_steps)
        batch = shape[:-2]
        return FixedPointSolution(
            value=self.x.reshape(shape),
            residual=self.errors[0].reshape(batch),
            error_bound=self.eq.error_bound(self.errors.sum(0), status).reshape(batch),
            num_steps=num_steps.reshape(batch),
            num_evaluations=(num_steps + self.num_measurements).reshape(batch),
            status=status.reshape(batch),
            norm=self.eq.norm,
        )


class _Equation:
    """y = x + f(x): the constant of f, and the tolerance.

    ``exact`` is f in float64 where y is in less; the other arguments are those of
    :func:`invert_residual`.
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

    def unreachable(self, length: Tensor) -> Tensor:
        """True if no answer in the format of y can meet the tolerance, from ‖y‖."""
        inner = self.rounding.relative * self.rounding.inner_size / self.one_minus_c
        return self.atol + self.rtol * length < self.least_rtol * length + inner

    def size(self, x: Tensor) -> Tensor:
        """‖x‖ of every row."""
        return vector_norm(at_least_single(x), self.norm).double()

    def within_tolerance(self, residual: Tensor, length: Tensor) -> Tensor:
        """True if residual/(1 − c) ≤ atol + rtol ‖x‖; False for NaN."""
        return residual <= self.one_minus_c * (self.atol + self.rtol * length)

    def predicted_steps(self, residual: Tensor, length: Tensor) -> Tensor | int:
        """Twice the steps that c allows for, and ten, from ‖r₀‖ and ‖x‖: cᵏ ‖r₀‖ ≤ (1 − c) τ/4."""
        c = self.global_bound
        if c is None:
            return STEPS_WITHOUT_PREDICTION
        ratio = self.one_minus_c * (self.atol + self.rtol * length) / 4 / residual
        steps = ratio.log() / math.log(max(c, 1e-300))
        return 2 * steps.nan_to_num(0).ceil().clamp(0, MOST_PREDICTED_STEPS).long() + 10

    def disproves(self, step: Tensor, change: Tensor, x: Tensor, fx: Tensor) -> Tensor:
        """True if ‖f(x) − f(x′)‖ > c ‖x − x′‖ beyond rounding.

        Args:
            step: ‖x − x′‖, the step from x′ to x.
            change: ‖f(x) − f(x′)‖.
            x: where the step led.
            fx: f(x).
        """
        c = self.global_bound
        if c is None:
            return torch.zeros_like(step, dtype=torch.bool)
        excess = change - c * step
        if bool((excess > 0).any()):
            excess -= self.rounding.of_step(2 * (self.size(x) + self.size(fx)) + step + change)
        if self.exact is not None and bool((excess > 0).any()):
            gap = self.size(fx.double() - self.exact(x.double()))
            excess -= 2 * FROM_POINT_TO_POINT * gap
        return excess > 0

    def measure(self, y: Tensor, x: Tensor, fx: Tensor) -> Tensor:
        """‖y − x − f(x)‖ of every sample, its own rounding, and the rounding of y."""
        if self.rounding.measured is None:
            residual = self.size(y - x - fx)
            unknown = torch.zeros_like(residual)
            return torch.stack([residual, unknown, unknown])
        value, gap = fx.double(), 0.0
        if self.exact is not None:
            value = self.exact(x.double())
            gap = self.size(fx.double() - value)
        residual = norm_upper(y.double() - x.double() - value, self.norm)
        size = self.size(x) + self.size(fx) + self.size(y)
        return torch.stack(
            [residual, self.rounding.of_residual(size, gap), self.rounding.of_output(size, gap)]
        )

    def error_bound(self, residual: Tensor, status: Tensor) -> Tensor:
        """≥ ‖x̂ − x‖ from the residual and all rounding; infinite if nothing follows."""
        broken = (status == InversionStatus.NOT_CONTRACTIVE) | (status == InversionStatus.NONFINITE)
        c = self.global_bound
        if c is None or self.rounding.measured is None:
            c = math.inf
        bound = contraction_error_bound(residual, c)
        return bound.masked_fill(broken | bound.isnan(), math.inf)


def comfortable_rtol(smallest: float, c: float) -> float:
    """A relative error that can be met with room to spare where ``smallest`` can just be met."""
    # Each step rounds, and J passes it on: together √(1 + c² + c⁴ + …) times one step's rounding.
    return max(LEAST_DEFAULT_RTOL, 8 * smallest / math.sqrt(1 - c * c))


def rtol_of_single_precision(c: float) -> float:
    """The relative error that float32 is asked for by default, if c < 1 is proven."""
    return comfortable_rtol(RESIDUAL_FLOOR[torch.float32] / (1 - c), c)
