"""What :func:`.invert_residual` found: the answer, its evidence, and a verdict on every sample."""

import math
from dataclasses import dataclass, field
from enum import IntEnum

from jaxtyping import Float, Int
from torch import Tensor

from invformer.numerics.error_bound import ErrorStep
from invformer.numerics.norms import Norm, Tokens


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
    """An approximate inverse x̂ and bounds on its error, per sample and on the processor.

    Attributes:
        value: x̂, (*batch, N, D).
        residual: ‖y − x̂ − f(x̂)‖.
        error_bound: ≥ ‖x̂ − x‖ for the x that a forward pass took to y, by the rounding model; inf
            for a sample that has not converged, and if there is no constant or it is one of
            diagonal blocks.
        num_steps: Picard steps taken.
        num_evaluations: evaluations of f, measurement included.
        status: an :class:`InversionStatus`.
        norm: the norm of residual, bound and tolerance.
        error_steps: how a layer's inverse passes errors on, for :func:`.stack_error_bound`.
    """

    value: Tokens
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


class FixedPointError(RuntimeError):
    """Some samples were not inverted; ``solution`` has their verdicts."""

    def __init__(
        self, solution: FixedPointSolution, what: str = "samples were not inverted"
    ) -> None:
        failed = ~solution.converged
        count = [(status, int((solution.status == status).sum())) for status in ADVICE]
        kinds = [(status, n) for status, n in count if n]
        worst = solution.residual[failed].nan_to_num(math.inf, math.inf).max()
        super().__init__(
            f"{int(failed.sum())} of {failed.numel()} {what} "
            f"({', '.join(f'{n} {status.name}' for status, n in kinds)}): worst residual "
            f"{float(worst):.1e} in {solution.norm} after {int(solution.num_steps.max())} steps. "
            + "; ".join(ADVICE[status] for status, _ in kinds)
        )
        self.solution = solution
