"""The loop all methods share: propose, evaluate, accept or fall back, judge; frozen once judged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.numerics.acceleration import Picard, Proposer
from invformer.numerics.fixed_point_solution import InversionStatus
from invformer.numerics.precision import has_answer_at_hand
from invformer.numerics.residual_equation import Contraction, Evidence, ResidualEquation

# Without a global constant a residual may grow for a while and still converge; beyond these factors
# over the smallest one seen it is given up. Under a causal mask transient growth is ordinary.
DIVERGENCE_FACTOR: dict[Contraction, float] = {"global": 1e3, "causal": 1e16}
STEPS_WITHOUT_PREDICTION = 1_000
MOST_PREDICTED_STEPS = 10_000
RUNNING = -1
# Within tolerance in the precision of the iterates; full precision has the last word.
CANDIDATE = -2

# An iterate x, f(x), y − x − f(x), and the norm of that.
Step = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class State:
    """Where every sample stands; per sample (B,) unless noted."""

    row: Tensor  # which sample
    x: Tensor  # (B, N, D), the iterate
    fx: Tensor  # (B, N, D), f there
    r: Tensor  # (B, N, D), y − x − f(x)
    residual: Tensor
    smallest: Tensor  # residual so far
    length: Tensor  # ‖x‖
    size: Tensor  # ‖x‖ + ‖f(x)‖
    reach: Tensor  # of plain steps: ‖x₀‖ and the lengths of all steps, ≥ ‖x‖
    status: Tensor
    num_steps: Tensor
    num_evaluations: Tensor
    observed_rate: Tensor
    max_steps: Tensor
    evidence: Evidence | None = None

    def of(self, rows: Tensor) -> "State":
        """Where some of the samples stand."""
        return State(**{name: value.index_select(0, rows) for name, value in self._tensors()})

    def _tensors(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "evidence"]


def together(parts: Sequence[State]) -> State:
    """All samples in their order, each from the part that has it."""
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {}
    for name, first in parts[0]._tensors():
        whole[name] = first.new_empty(sum(len(p.row) for p in parts), *first.shape[1:])
        for part in parts:
            whole[name].index_copy_(0, part.row, getattr(part, name))
    return State(**whole)


def iterate(
    equation: ResidualEquation,
    proposer: Proposer,
    max_steps: int | None,
    status: Tensor,
) -> State:
    """Step until every sample has its verdict, CONVERGED only with the evidence for it.

    All candidates are measured at once, in a precision that costs twice as much; those that are
    not confirmed go on.
    """
    s = first_state(equation, max_steps, status)
    while bool((s.status < 0).any()):
        s = replace(_approach(equation, proposer, s), evidence=s.evidence)
        if bool((s.status == CANDIDATE).any()):
            _confirm(equation, s)
        proposer.forget()
    return s


def _approach(equation: ResidualEquation, proposer: Proposer, s: State) -> State:
    """Propose, evaluate, accept or fall back to Picard, while samples are RUNNING.

    A Picard step is always accepted: with a global c it shrinks the residual, with a causal one
    runs of them do. Others must beat the present residual, under a causal c the smallest so far.
    """
    causal = equation.contraction == "causal"
    only_plain = isinstance(proposer, Picard)
    plain = torch.full_like(s.status, only_plain, dtype=torch.bool)
    stopped: list[State] = []
    while count := int((active := s.status == RUNNING).sum()):
        if equation.compact and count < len(active):
            rows, others = active.nonzero().squeeze(1), (~active).nonzero().squeeze(1)
            stopped.append(s.of(others))
            s, equation, active, plain = s.of(rows), equation.of(rows), active[rows], plain[rows]
            proposer.of(rows)
        everyone = count == len(active)
        if only_plain and everyone and has_answer_at_hand(active):
            taken, extra = _plain_steps(equation, s), 0
        else:
            taken, extra = _one_step(equation, proposer, s, active, plain, everyone)
        proposal, fp, r, residual = taken
        length = equation.size(proposal)
        size = length + equation.size(fp)
        s.num_steps += active
        s.num_evaluations += active * (extra + 1)

        if only_plain:  # which moves by r, and leaves as residual by how much f changed
            lengths = s.residual, residual
            reach = s.reach + s.residual
            sizes = equation.largest_size(reach, residual) + equation.largest_size(
                s.reach, s.residual
            )
            s.reach = torch.where(active, reach, s.reach)
        else:
            lengths = equation.size(proposal - s.x), equation.size(fp - s.fx)
            sizes = size + s.size
        rate = equation.observed_rate(*lengths, sizes)
        if equation.gap is None and bool((active & equation.disproved(rate)).any()):
            # Doubts about c are only raised on measured rounding.
            equation = equation.with_gap()
            s.num_evaluations += active
            rate = equation.observed_rate(*lengths, sizes)
        s.observed_rate = torch.where(active, torch.maximum(s.observed_rate, rate), s.observed_rate)
        accepted = active
        if not only_plain:
            accepted = active & (plain | (residual <= (s.smallest if causal else s.residual)))
            step = (proposal - s.x).masked_fill(~accepted[:, None, None], 0)
            bend = (r - s.r).masked_fill(~accepted[:, None, None], 0)
            proposer.learn(step, bend, keep=accepted)
            plain = active & ~accepted

        finite = (residual + size).isfinite()
        broken = accepted & ~finite
        # Past this line only finite iterates move: the last finite one is what is returned.
        accepted = accepted & finite
        if has_answer_at_hand(accepted) and bool(accepted.all()):
            s.x, s.fx, s.r = proposal, fp, r
            s.residual, s.length, s.size = residual, length, size
        else:
            moved = accepted[:, None, None]
            s.x, s.fx = torch.where(moved, proposal, s.x), torch.where(moved, fp, s.fx)
            s.r = torch.where(moved, r, s.r)
            s.residual = torch.where(accepted, residual, s.residual)
            s.length = torch.where(accepted, length, s.length)
            s.size = torch.where(accepted, size, s.size)
        s.smallest = torch.minimum(s.smallest, s.residual)

        _judge(equation, s, broken)
    return together([*stopped, s])


def _one_step(
    equation: ResidualEquation,
    proposer: Proposer,
    s: State,
    active: Tensor,
    plain: Tensor,
    everyone: bool,
) -> tuple[Step, Tensor | int]:
    """What the proposer suggests to active samples, Picard's step where ``plain``; and its price.

    The others stay where they are; ``everyone`` says that there are none.
    """
    only_plain = isinstance(proposer, Picard)
    x, extra = proposer.propose(s.x, s.r, active if only_plain else active & ~plain)
    if not only_plain:
        x = torch.where(plain[:, None, None], s.x + s.r, x)
    if not everyone:
        x = torch.where(active[:, None, None], x, s.x)
    return (x, *equation.look(x)), extra


def _plain_steps(equation: ResidualEquation, s: State) -> Step:
    """Picard steps of all samples, up to one that might have to be judged; that one is returned.

    A step that shrinks every residual as it should, and none to within tolerance, needs no verdict,
    and no length but the residual's: ‖x + r‖ ≤ ‖x‖ + ‖r‖ bounds those that tolerance and rounding
    go by. ``s`` is then where the last of them ended, its ``length`` and ``size`` such bounds.
    """
    allowed = int((s.max_steps - s.num_steps).min())
    residuals, reaches = [s.residual], [s.reach]
    while True:
        x = s.x + s.r
        fx, r, residual = equation.look(x)
        reach = reaches[-1] + residuals[-1]
        if len(residuals) >= allowed or not equation.is_on_its_way(residuals[-1], residual, reach):
            break
        s.x, s.fx, s.r = x, fx, r
        residuals.append(residual)
        reaches.append(reach)
    if len(residuals) > 1:
        before, after = torch.stack(residuals[:-1]), torch.stack(residuals[1:])
        sizes = equation.largest_size(torch.stack(reaches), torch.stack(residuals))
        rates = equation.observed_rate(before, after, sizes[1:] + sizes[:-1])
        s.observed_rate = torch.maximum(s.observed_rate, rates.amax(0))
        s.num_steps += len(after)
        s.num_evaluations += len(after)
        s.residual, s.reach = residuals[-1], reaches[-1]
        s.length, s.size = s.reach, sizes[-1]
        s.smallest = torch.minimum(s.smallest, s.residual)
    return x, fx, r, residual


def refused_or_running(equation: ResidualEquation) -> Tensor:
    """The status every sample begins with."""
    refused = equation.tolerance_below_precision()
    return torch.where(refused, int(InversionStatus.TOLERANCE_BELOW_PRECISION), RUNNING)


def first_state(equation: ResidualEquation, max_steps: int | None, status: Tensor) -> State:
    """Evaluate f at the start and settle what can be settled before the first step."""
    x, fx, r = equation.start, equation.value_at_start, equation.start_residual
    residual = equation.first_residual
    length = equation.size_of_y if equation.starts_at_y else equation.size(x)
    size = length + (residual if equation.starts_at_y else equation.size(fx))
    s = State(
        row=torch.arange(len(x), device=x.device),
        x=x,
        fx=fx,
        r=r,
        residual=residual,
        smallest=residual,
        length=length,
        size=size,
        reach=length,
        status=status,
        num_steps=torch.zeros_like(status),
        num_evaluations=(status == RUNNING).long(),
        observed_rate=torch.zeros_like(residual),
        max_steps=_step_limit(equation, residual, max_steps),
    )
    _judge(equation, s, ~(residual + size).isfinite())
    return s


def _judge(equation: ResidualEquation, s: State, broken: Tensor) -> None:
    """Give the running samples their verdict, if it is time; of several the last one counts.

    Where the working residual is not the one in full precision, CONVERGED has to be confirmed.
    """
    if equation.exact_residual:
        total, success = s.residual, InversionStatus.CONVERGED
        if equation.evidence:
            total = total + equation.rounding(s.size, equation.gap)
    else:
        total, success = s.residual, CANDIDATE
    verdict = _failures(equation, s)
    verdict.masked_fill_(equation.within_tolerance(s.length, total), success)
    verdict.masked_fill_(equation.disproved(s.observed_rate), InversionStatus.NOT_CONTRACTIVE)
    verdict.masked_fill_(broken, InversionStatus.NONFINITE)
    s.status = torch.where(s.status == RUNNING, verdict, s.status)


def _failures(equation: ResidualEquation, s: State) -> Tensor:
    """DIVERGED, MAX_STEPS or RUNNING."""
    verdict = torch.full_like(s.status, RUNNING)
    verdict.masked_fill_(s.num_steps >= s.max_steps, InversionStatus.MAX_STEPS)
    limit = DIVERGENCE_FACTOR[equation.contraction] * s.smallest
    return verdict.masked_fill_(s.residual > limit, InversionStatus.DIVERGED)


def _confirm(equation: ResidualEquation, s: State) -> None:
    """Measure the candidates in full precision: CONVERGED, or RUNNING again."""
    candidates = s.status == CANDIDATE
    s.num_evaluations += candidates
    rows = candidates.nonzero().squeeze(1) if equation.compact else s.row
    if len(rows) < len(s.row):
        some = s.x[rows], s.fx[rows], s.r[rows], s.size[rows]
        found = equation.of(rows).measure(*some).among(s.row, rows)
    else:
        found = equation.measure(s.x, s.fx, s.r, s.size)
    total = found.residual + found.rounding
    confirmed = candidates & equation.within_tolerance(s.length, total)
    s.evidence = _collected(s.evidence, found._replace(known=confirmed))
    verdict = _failures(equation, s).masked_fill_(confirmed, InversionStatus.CONVERGED)
    s.status = torch.where(candidates, verdict, s.status)


def _collected(before: Evidence | None, new: Evidence) -> Evidence:
    """The new evidence where there is some, the earlier one elsewhere."""
    if before is None:
        return new
    chosen = new.known[:, None]
    return Evidence(
        before.known | new.known,
        torch.where(new.known, new.residual, before.residual),
        torch.where(new.known, new.rounding, before.rounding),
        torch.where(chosen, new.token_residual, before.token_residual),
        torch.where(new.known, new.output_error, before.output_error),
    )


def _step_limit(equation: ResidualEquation, residual: Tensor, max_steps: int | None) -> Tensor:
    c = equation.lipschitz_bound
    if max_steps is not None:
        limit = torch.full_like(residual, max_steps)
    elif c is None or equation.contraction == "causal":
        limit = torch.full_like(residual, STEPS_WITHOUT_PREDICTION)
    else:
        # Half the residual for rounding, twice the steps for proposals that were rejected.
        predicted = predicted_steps(c, residual, equation.tolerance(equation.size_of_y) / 4)
        limit = 2 * predicted + 10
    return limit.long()


def predicted_steps(
    lipschitz_bound: float, residual: Float[Tensor, "..."], tolerance: Float[Tensor, "..."] | float
) -> Int[Tensor, "..."]:
    """Picard steps until the error is at most ``tolerance``: the residual shrinks by c a step.

        k = ⌈log((1 − c) tolerance / ‖r₀‖) / log c⌉

    An upper bound on the steps in exact arithmetic, if Lip(f) ≤ c in the norm of the residual.

    Args:
        lipschitz_bound: c in [0, 1).
        residual: ‖r₀‖ = ‖y − x₀ − f(x₀)‖.
        tolerance: the error allowed, in the same norm.

    Returns:
        The number of steps, at least 0 and at most ten thousand.
    """
    ratio = (1 - lipschitz_bound) * tolerance / residual.double()
    steps = ratio.log() / math.log(max(lipschitz_bound, 1e-300))
    return steps.nan_to_num(0).ceil().clamp(0, MOST_PREDICTED_STEPS).long()
