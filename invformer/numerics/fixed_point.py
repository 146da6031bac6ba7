"""Invert y = x + f(x) for a contraction f, with a bound on the error of every sample.

    x ← y − f(x),    ‖x̂ − x*‖ ≤ (‖y − x̂ − f(x̂)‖ + rounding) / (1 − c)

Source: Behrmann et al. 2019, arXiv 1811.00995, Algorithm 1 and Theorem 1.
"""

import math

import torch
from torch import Tensor

from invformer.numerics.error_bound import RoundingModel
from invformer.numerics.fixed_point_solution import (
    FixedPointError,
    FixedPointSolution,
    InversionStatus,
)
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Norm, Tokens
from invformer.numerics.precision import RESIDUAL_FLOOR
from invformer.numerics.residual_equation import Kind, ResidualEquation

RUNNING = -1


@torch.no_grad()
def invert_residual(
    f: SequenceMap,
    y: Tokens,
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

    A sample has converged if ‖y − x − f(x)‖ ≤ (1 − c)(atol + rtol ‖x‖), up to underflow; with
    ``evidence`` this is measured again, by ``residual_map`` if it is given, with the rounding
    added. Otherwise it ends after ``max_steps``, when c is disproved, or with NaN or infinity.
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
    eq = ResidualEquation(exact, rounding, norm, kind, lipschitz_bound, atol, rtol)
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
        eq: ResidualEquation,
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
        size, self.residual = eq.sizes(self.y, self.fx)
        size = self.by_sample(size)
        largest = size + self.by_sample(self.residual) / eq.one_minus_c  # ‖x‖ ≤ ‖y‖ + ‖x − y‖
        unreachable = eq.unreachable(size) & eq.unreachable(largest)
        status = torch.where(unreachable, InversionStatus.TOLERANCE_BELOW_PRECISION, RUNNING)
        self.status = status.repeat_interleave(self.per_sample)
        self.size = size.repeat_interleave(self.per_sample)
        self.num_steps = torch.zeros_like(self.status)
        limit = eq.predicted_steps(self.residual, self.size) if max_steps is None else max_steps
        self.limit = torch.zeros_like(self.status) + limit
        if max_steps is not None and max_steps <= 0:  # a verdict on y as it is
            rows = self.running.nonzero().squeeze(-1)
            self.judge(rows, torch.zeros_like(rows, dtype=torch.bool))
        # Of every sample: the residual, its rounding, and the rounding of y.
        self.errors = torch.zeros(3, len(samples), dtype=torch.float64)
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
        # ‖y − x − f(x)‖, which is also how long the next step is, and ‖x‖.
        residual, size = self.eq.sizes(fx - fx_before, x)
        disproved = self.eq.disproves(self.residual[rows], residual, x, fx)
        self.x[rows], self.fx[rows] = x, fx  # copies: f may write its next result over fx
        self.residual[rows], self.size[rows] = residual, size
        self.num_steps[rows] += 1
        self.judge(rows, disproved)

    def judge(self, rows: slice | Tensor, disproved: Tensor) -> None:
        """The status of some rows after a step; ``disproved`` says where c is."""
        residual = self.residual[rows]
        largest = self.by_sample(self.size).repeat_interleave(self.per_sample)[rows]
        verdict = self.status[rows]
        for outcome, applies in (  # of several the last one counts
            (InversionStatus.MAX_STEPS, self.num_steps[rows] >= self.limit[rows]),
            (InversionStatus.CONVERGED, self.eq.within_tolerance(residual, largest)),
            (InversionStatus.NOT_CONTRACTIVE, disproved),
            (InversionStatus.NONFINITE, ~(residual + largest < math.inf)),
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
        accurate = self.eq.within_tolerance(self.errors[:2].sum(0), self.by_sample(self.size))
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
