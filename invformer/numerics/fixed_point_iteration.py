"""The loop all methods share: propose, evaluate, accept or fall back, judge; frozen once judged."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.numerics.acceleration import Picard, Proposer
from invformer.numerics.fixed_point_solution import InversionStatus
from invformer.numerics.residual_equation import Contraction, Evidence, ResidualEquation

# Without a global constant a residual may grow for a while and still converge; beyond these factors
# over the smallest one seen it is given up. Under a causal mask transient growth is ordinary.
DIVERGENCE_FACTOR: dict[Contraction, float] = {"global": 1e3, "causal": 1e16}
STEPS_WITHOUT_PREDICTION = 1_000
MOST_PREDICTED_STEPS = 10_000
RUNNING = -1


@dataclass
class State:
    """Where every sample stands; per sample (B,) unless noted."""

    x: Tensor  # (B, N, D), the iterate
    fx: Tensor  # (B, N, D), f there
    r: Tensor  # (B, N, D), y − x − f(x)
    residual: Tensor
    smallest: Tensor  # residual so far
    length: Tensor  # ‖x‖
    size: Tensor  # ‖x‖ + ‖f(x)‖
    status: Tensor
    num_steps: Tensor
    num_evaluations: Tensor
    observed_rate: Tensor
    max_steps: Tensor
    evidence: Evidence | None = None


def iterate(
    equation: ResidualEquation,
    proposer: Proposer,
    max_steps: int | None,
    status: Tensor,
) -> State:
    """Propose, evaluate, accept or fall back to Picard, until every sample has its verdict.

    A Picard step is always accepted: with a global c it shrinks the residual, with a causal one
    runs of them do. Others must beat the present residual, under a causal c the smallest so far.
    """
    s = first_state(equation, max_steps, status)
    causal = equation.contraction == "causal"
    only_plain = isinstance(proposer, Picard)
    on_cpu = s.x.device.type == "cpu"  # where asking costs no synchronisation
    plain = torch.full_like(s.status, only_plain, dtype=torch.bool)
    while count := int((active := s.status == RUNNING).sum()):
        proposal, extra = proposer.propose(s.x, s.r, active & ~plain)
        if not only_plain:
            proposal = torch.where(plain[:, None, None], s.x + s.r, proposal)
        if count < len(active):
            proposal = torch.where(active[:, None, None], proposal, s.x)
        fp = equation.evaluate(proposal, active, count)
        r = equation.y - proposal - fp
        residual, length = equation.size(r), equation.size(proposal)
        size = length + equation.size(fp)
        s.num_steps += active
        s.num_evaluations += torch.where(active, extra + 1, 0)

        if only_plain:  # which moves by r, and leaves as residual by how much f changed
            lengths = s.residual, residual
        else:
            lengths = equation.size(proposal - s.x), equation.size(fp - s.fx)
        rate = equation.observed_rate(*lengths, size + s.size)
        if equation.gap is None and bool((active & equation.disproved(rate)).any()):
            # Doubts about c are only raised on measured rounding.
            equation = equation.with_gap()
            s.num_evaluations += active
            rate = equation.observed_rate(*lengths, size + s.size)
        s.observed_rate = torch.where(active, torch.maximum(s.observed_rate, rate), s.observed_rate)
        accepted = active & (plain | (residual <= (s.smallest if causal else s.residual)))
        if not only_plain:
            step = (proposal - s.x).masked_fill(~accepted[:, None, None], 0)
            bend = (r - s.r).masked_fill(~accepted[:, None, None], 0)
            proposer.learn(step, bend, keep=accepted)
        plain = only_plain | (active & ~accepted)

        finite = residual.isfinite() & size.isfinite()
        _judge(s, InversionStatus.NONFINITE, accepted & ~finite)
        # Past this line only finite iterates move: the last finite one is what is returned.
        accepted = accepted & finite
        if on_cpu and bool(accepted.all()):
            s.x, s.fx, s.r = proposal, fp, r
        else:
            moved = accepted[:, None, None]
            s.x, s.fx = torch.where(moved, proposal, s.x), torch.where(moved, fp, s.fx)
            s.r = torch.where(moved, r, s.r)
        s.residual = torch.where(accepted, residual, s.residual)
        s.length = torch.where(accepted, length, s.length)
        s.size = torch.where(accepted, size, s.size)
        s.smallest = torch.minimum(s.smallest, s.residual)

        _judge(s, InversionStatus.NOT_CONTRACTIVE, equation.disproved(s.observed_rate))
        _judge_convergence(equation, s)
        limit = DIVERGENCE_FACTOR[equation.contraction] * s.smallest
        _judge(s, InversionStatus.DIVERGED, s.residual > limit)
        _judge(s, InversionStatus.MAX_STEPS, s.num_steps >= s.max_steps)
    return s


def refused_or_running(equation: ResidualEquation) -> Tensor:
    """The status every sample begins with."""
    refused = equation.tolerance_below_precision()
    return torch.where(refused, int(InversionStatus.TOLERANCE_BELOW_PRECISION), RUNNING)


def first_state(equation: ResidualEquation, max_steps: int | None, status: Tensor) -> State:
    """Evaluate f at the start and settle what can be settled before the first step."""
    x = equation.start
    fx = equation.f(x) if equation.f_start is None else equation.f_start
    r = equation.y - x - fx
    residual, length = equation.size(r), equation.size(x)
    size = length + equation.size(fx)
    s = State(
        x=x,
        fx=fx,
        r=r,
        residual=residual,
        smallest=residual,
        length=length,
        size=size,
        status=status,
        num_steps=torch.zeros_like(status),
        num_evaluations=(status == RUNNING).long(),
        observed_rate=torch.zeros_like(residual),
        max_steps=_step_limit(equation, residual, max_steps),
    )
    nonfinite = ~(residual.isfinite() & size.isfinite())
    s.status = torch.where(nonfinite, int(InversionStatus.NONFINITE), s.status)
    _judge_convergence(equation, s)
    return s


def _judge(s: State, verdict: InversionStatus, condition: Tensor) -> None:
    """Give a verdict to the running samples that meet the condition."""
    s.status = torch.where((s.status == RUNNING) & condition, int(verdict), s.status)


def _judge_convergence(equation: ResidualEquation, s: State) -> None:
    """CONVERGED needs the working residual first, and then the one in full precision."""
    candidates = (s.status == RUNNING) & equation.within_tolerance(s.length, s.residual)
    if equation.exact_residual:
        total = s.residual + equation.rounding(s.size, equation.gap)
        _judge(
            s, InversionStatus.CONVERGED, candidates & equation.within_tolerance(s.length, total)
        )
        return
    if not bool(candidates.any()):
        return
    found = equation.measure(s.x, s.fx, candidates)
    s.num_evaluations += candidates
    total = found.residual + found.rounding
    confirmed = candidates & equation.within_tolerance(s.length, total)
    _judge(s, InversionStatus.CONVERGED, confirmed)
    s.evidence = _collected(s.evidence, found._replace(known=confirmed))


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
