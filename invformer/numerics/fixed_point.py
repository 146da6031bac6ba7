"""The inversion engine: the x with y = x + f(x), and the evidence for it.

Every answer carries a bound on its error that holds whatever found it (:mod:`.error_bound`), a
verdict per sample, and the largest rate seen, which can disprove the constant the bound relies on.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.acceleration import Anderson, Picard
from invformer.numerics.fixed_point_iteration import (
    RUNNING,
    State,
    iterate,
    predicted_steps,
    refused_or_running,
)
from invformer.numerics.fixed_point_solution import (
    FixedPointError,
    FixedPointSolution,
    InversionStatus,
)
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import NORMS, Norm
from invformer.numerics.precision import RESIDUAL_FLOOR
from invformer.numerics.residual_equation import (
    Contraction,
    ResidualEquation,
    residual_equation,
)
from invformer.numerics.token_wise import approach

Method = Literal["picard", "anderson", "auto"]
# Picard steps that ``auto`` takes before it calls a sample slow. A step of Anderson's costs about
# twice one of Picard's, so that it pays where the residual shrinks by less than a half each time.
PICARD_STEPS = 40

__all__ = [
    "FixedPointError",
    "FixedPointSolution",
    "InversionStatus",
    "Method",
    "invert_residual",
    "predicted_steps",
]


def invert_residual(
    f: SequenceMap,
    y: Float[Tensor, "*batch tokens width"],
    *,
    lipschitz_bound: float | None,
    norm: Norm,
    method: Method = "picard",
    contraction: Contraction = "global",
    off_diagonal_bound: float | Tensor | None = None,
    atol: float = 0.0,
    rtol: float | None = None,
    max_steps: int | None = None,
    initial: Float[Tensor, "*batch tokens width"] | None = None,
    residual_map: SequenceMap | None = None,
    forward_map: SequenceMap | None = None,
    forward_dtype: torch.dtype | None = None,
    inner_size: float = 0.0,
    evaluation_error: Tensor | float | None = None,
    output_error: Tensor | float | None = None,
    compact: bool = False,
    token_wise: bool = False,
    polish: bool = False,
    evidence: bool = True,
    throw: bool = True,
) -> FixedPointSolution:
    """x̂ ≈ x* with x* + f(x*) = y, sample by sample, with a bound on ‖x̂ − x*‖.

    Picard iterates x ← y − f(x) (Behrmann et al. 2019, Algorithm 1); the other methods propose
    better steps and fall back to Picard's whenever the residual does not drop. Whatever was done,

        ‖x̂ − x*‖ ≤ (‖y − x̂ − f(x̂)‖ + rounding) / (1 − c)       (``contraction="global"``)

    in ``norm``, with the residual in float64. A sample is frozen once it has its verdict, so its
    answer does not depend on its batch mates beyond the rounding of f itself. Below
    float64 the iterates that pass in their own precision are measured in float64 all together, at
    the end. Host synchronisations a step: one (have all samples got a verdict?), below float64
    another, with ``compact`` two more whenever samples are solved.

    The result is detached: the solver does not record its steps, not even for the weights inside f.

    Args:
        f: acts on each sample of (*batch, N, D) separately and does not change between calls.
        y: what to invert; its dtype is the precision of the iterates.
        lipschitz_bound: c < 1, proven, in ``norm``; None if nothing is: the error bound is then
            infinite and CONVERGED speaks of the residual only.
        norm: the norm of c, of the tolerance and of every reported length.
        method: ``picard`` (one evaluation a step), ``anderson`` (the same, five steps remembered),
            ``auto`` (Picard, then Anderson for samples that forty steps do not solve).
        contraction: ``global`` if c bounds Lip(f); ``causal`` if it bounds x_i ↦ f_i(x_{<i}, x_i)
            for every fixed past. The iteration then still converges from every start, but not
            monotonically, c cannot be disproved by a growing step, and a small residual bounds no
            error unless ``off_diagonal_bound`` is known (:func:`.error_bound.causal_error_bound`).
        off_diagonal_bound: causal only, L or the matrix L_ij of that function.
        atol: error allowed, in units of x.
        rtol: error allowed relative to ‖x̂‖; None takes 1e-10, or what the format and c can reach
            with room to spare if that is larger.
        max_steps: None takes what c predicts, twice and some more, or a thousand without a global
            c.
        initial: where to start; None starts at y.
        residual_map: f evaluated in float64, on float64 input. None tries f itself; an f that
            refuses float64 is measured in its own precision, with that precision's allowance.
        forward_map: f as the forward pass ran it, if y's dtype does not tell (y was computed in
            float32 and is inverted in float64); only to measure what the forward pass rounds.
        forward_dtype: the precision of ``forward_map``.
        inner_size: length, in ``norm``, of what f adds up inside, whatever x is, where that may be
            larger than what goes in and comes out (biases that cancel); for the model below.
        evaluation_error: proven bound on ‖fl(f(x)) − f(x)‖ for the map behind the residual. None
            takes a model: 4 √(N + D) u (‖x‖ + ‖f(x)‖ + inner_size), and 16 times the difference
            between both precisions scaled down to float64 where two are there.
        output_error: bound on ‖y − (x + f(x))‖ for the x that is wanted; 0 if y is exact. None
            takes what a forward pass in y's dtype rounds, measured as the difference between both
            precisions, times four.
        compact: leave solved samples out of the batch. f must then accept any batch size;
            kernels may round differently for it.
        token_wise: f takes every token by itself, whatever sequences there are. Picard then moves
            only the tokens that have not arrived, where ``norm`` is the largest of theirs.
        polish: continue in float64 with the residual map; the value is then float64.
        evidence: measure in float64 and bound the error. Without, CONVERGED speaks of the residual
            in y's precision, nothing is proven (``error_bound`` is infinite), and below float64 an
            evaluation of twice the price is saved.
        throw: raise if any sample fails; otherwise leave it to ``status``.

    Returns:
        The inverse and its evidence, per sample.

    Raises:
        FixedPointError: ``throw`` and some sample did not converge.
        ValueError: an argument is impossible, or y wants a gradient.
    """
    _check_arguments(y, lipschitz_bound, norm, method, contraction, atol, rtol, max_steps)
    if polish and not evidence:
        raise ValueError("polish=True goes on in float64: it needs evidence=True")
    if off_diagonal_bound is not None and contraction == "global":
        raise ValueError(
            "off_diagonal_bound belongs to contraction='causal'; a global c needs none"
        )
    with torch.no_grad():
        equation = residual_equation(
            f,
            y.detach(),
            initial,
            residual_map,
            forward_map,
            forward_dtype,
            inner_size=inner_size,
            norm=norm,
            lipschitz_bound=lipschitz_bound,
            contraction=contraction,
            off_diagonal_bound=off_diagonal_bound,
            evaluation_error=evaluation_error,
            output_error=output_error,
            compact=compact,
            evidence=evidence,
        )
        polish = polish and y.dtype != torch.float64
        if not polish:
            equation = equation.with_tolerance(atol, rtol)
        first_residual = equation.first_residual
        solver = _Solver(method, max_steps)
        if polish:
            equation, state = solver.solve_and_polish(equation, atol, rtol)
        elif token_wise and solver.goes_by_tokens(equation):
            equation, state = solver.solve_by_tokens(equation)
        else:
            state = solver.solve(equation, refused_or_running(equation))
        solution = _conclude(equation, state, first_residual, y.shape)
    if throw and not bool(solution.converged.all()):
        raise FixedPointError(solution)
    return solution


@dataclass(frozen=True)
class _Solver:
    """How to solve: the method and its budget."""

    method: Method
    max_steps: int | None

    def solve(self, equation: ResidualEquation, status: Tensor) -> State:
        """Give every running sample its verdict."""
        match self.method:
            case "picard":
                return iterate(equation, Picard(), self.max_steps, status)
            case "anderson":
                mixing = Anderson(token_wise=equation.contraction == "causal")
                return iterate(equation, mixing, self.max_steps, status)
            case "auto":
                return self.solve_slow_ones_faster(equation, status)

    def goes_by_tokens(self, equation: ResidualEquation) -> bool:
        """Whether tokens of a token-wise f may be left where they are, one by one."""
        plain = self.method in ("picard", "auto")
        largest = equation.norm != "frobenius" and equation.contraction == "global"
        solvable = not bool(equation.tolerance_below_precision().any())
        return plain and largest and equation.lipschitz_bound is not None and solvable

    def solve_by_tokens(self, equation: ResidualEquation) -> tuple[ResidualEquation, State]:
        """First every token as far as it has to go, then whole sequences from there."""
        allowed = math.inf if self.max_steps is None else self.max_steps
        start = approach(equation, int(min(PICARD_STEPS, allowed)))
        if start is None:
            return equation, self.solve(equation, refused_or_running(equation))
        left = None if self.max_steps is None else self.max_steps - start.num_steps
        rest = replace(self, max_steps=left)
        state = rest.solve(start.equation, refused_or_running(start.equation))
        state.num_steps = state.num_steps + start.num_steps
        state.num_evaluations = state.num_evaluations + start.num_steps
        state.observed_rate = torch.maximum(state.observed_rate, start.observed_rate)
        return start.equation, state

    def solve_slow_ones_faster(self, equation: ResidualEquation, status: Tensor) -> State:
        """Picard while its steps are few, then Anderson from where the others stand."""
        allowed = math.inf if self.max_steps is None else self.max_steps
        before = iterate(equation, Picard(), int(min(PICARD_STEPS, allowed)), status)
        slow = before.status == InversionStatus.MAX_STEPS
        if allowed <= PICARD_STEPS or not bool(slow.any()):
            return before
        left = None if self.max_steps is None else self.max_steps - PICARD_STEPS
        mixing = replace(self, method="anderson", max_steps=left)
        status = before.status.masked_fill(slow, RUNNING)
        return _joined(mixing.solve(equation.from_start(before.x), status), [before])

    def solve_and_polish(
        self, equation: ResidualEquation, atol: float, rtol: float | None
    ) -> tuple[ResidualEquation, State]:
        """As far as y's precision goes, then on in float64 from there."""
        if equation.residual_dtype != torch.float64:
            raise ValueError("polish=True needs f in float64: pass residual_map")
        rough = equation.with_tolerance(0.0, None)
        before = self.solve(rough, refused_or_running(rough))
        fine = equation.from_start(before.x).in_float64().with_tolerance(atol, rtol)
        # Evidence against c stands, and so does NaN; any other verdict was about the low precision.
        final = (before.status == InversionStatus.NOT_CONTRACTIVE) | (
            before.status == InversionStatus.NONFINITE
        )
        status = torch.where(final, before.status, refused_or_running(fine))
        return fine, _joined(self.solve(fine, status), [before])


def _joined(last: State, before: list[State]) -> State:
    """The last state, with the work and the rates of the earlier ones."""
    for part in before:
        last.num_steps = last.num_steps + part.num_steps
        last.num_evaluations = last.num_evaluations + part.num_evaluations
        last.observed_rate = torch.maximum(last.observed_rate, part.observed_rate)
    return last


def _conclude(
    equation: ResidualEquation, s: State, first_residual: Tensor, shape: torch.Size
) -> FixedPointSolution:
    """Measure every final iterate, converged or not, and bound its error."""
    evidence = s.evidence
    if evidence is None or not bool(evidence.known.all()):
        evidence = equation.measure(s.x, s.fx, s.r, s.size)
        s.num_evaluations += 0 if equation.exact_residual else 1
    _, residual, rounding, token_residual, output_error = evidence
    broken = (s.status == InversionStatus.NOT_CONTRACTIVE) | (s.status == InversionStatus.NONFINITE)
    bound = equation.error_bound(residual, token_residual, rounding + output_error)
    batch = shape[:-2]
    predicted = None
    if equation.lipschitz_bound is not None and equation.contraction == "global":
        tolerance = equation.tolerance(equation.size_of_y)
        predicted = predicted_steps(equation.lipschitz_bound, first_residual, tolerance)
        predicted = predicted.reshape(batch)
    return FixedPointSolution(
        value=s.x.reshape(shape),
        residual=residual.reshape(batch),
        error_bound=bound.masked_fill(broken | bound.isnan(), math.inf).reshape(batch),
        num_steps=s.num_steps.reshape(batch),
        predicted_steps=predicted,
        num_evaluations=s.num_evaluations.reshape(batch),
        status=s.status.reshape(batch),
        observed_rate=s.observed_rate.reshape(batch),
        output_error=output_error.reshape(batch),
        norm=equation.norm,
        lipschitz_bound=equation.lipschitz_bound,
        contraction=equation.contraction,
        residual_dtype=equation.residual_dtype,
    )


def _check_arguments(
    y: Tensor,
    lipschitz_bound: float | None,
    norm: str,
    method: str,
    contraction: str,
    atol: float,
    rtol: float | None,
    max_steps: int | None,
) -> None:
    if y.ndim < 2 or y.dtype not in RESIDUAL_FLOOR:
        raise ValueError(f"y must be floating point (*batch, N, D), got {y.dtype} {tuple(y.shape)}")
    if y.numel() == 0:
        raise ValueError(f"there is nothing to invert: y is empty, of shape {tuple(y.shape)}")
    if lipschitz_bound is not None and not 0 <= lipschitz_bound < 1:
        raise ValueError(
            f"lipschitz_bound must be in [0, 1), got {lipschitz_bound}: scale f down, or pass None "
            "and get no error bound"
        )
    if y.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "the steps of the solver are not recorded: wrap the call in torch.no_grad()"
        )
    for name, value, choices in (
        ("norm", norm, NORMS),
        ("method", method, get_args(Method)),
        ("contraction", contraction, get_args(Contraction)),
    ):
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {tolerance}")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")
