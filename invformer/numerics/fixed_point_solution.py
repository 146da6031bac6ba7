"""What an inversion returns: the answer, its evidence and its verdict."""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.numerics.norms import Norm
from invformer.numerics.residual_equation import Contraction


class InversionStatus(IntEnum):
    """The verdict on one sample.

    CONVERGED: (‖y − x̂ − f(x̂)‖ + rounding)/(1 − c) ≤ atol + rtol ‖x̂‖.
    MAX_STEPS: the steps ran out first.
    DIVERGED: the residual grew instead of shrinking.
    NONFINITE: y, f or the residual contains NaN or infinity.
    NOT_CONTRACTIVE: ‖f(x) − f(x′)‖ > c ‖x − x′‖ was seen, beyond rounding: c is disproved.
    TOLERANCE_BELOW_PRECISION: no answer in this format can meet the tolerance; nothing was tried.
    """

    CONVERGED = 0
    MAX_STEPS = 1
    DIVERGED = 2
    NONFINITE = 3
    NOT_CONTRACTIVE = 4
    TOLERANCE_BELOW_PRECISION = 5


ADVICE = {
    InversionStatus.MAX_STEPS: "raise max_steps, loosen the tolerance or use method='anderson'",
    InversionStatus.DIVERGED: "f is no contraction here: certify it in this norm",
    InversionStatus.NONFINITE: "look for NaN or infinity in y and in the weights of f",
    InversionStatus.NOT_CONTRACTIVE: "the iterates disprove lipschitz_bound: certify the weights "
    "that f runs with, in this norm",
    InversionStatus.TOLERANCE_BELOW_PRECISION: "loosen the tolerance or pass float64 tensors",
}


@dataclass(frozen=True)
class FixedPointSolution:
    """An approximate inverse x̂ and how far it can be from the truth; every field is per sample.

    Attributes:
        value: x̂, (*batch, N, D).
        residual: ‖y − x̂ − f(x̂)‖, evaluated in ``residual_dtype``.
        error_bound: ≥ ‖x̂ − x‖ for every x with ‖y − x − f(x)‖ ≤ ``output_error``; infinite if no
            bound follows from what is known (no constant, a disproved one, a causal one alone).
        num_steps: proposals tried.
        predicted_steps: Picard steps that c allows for from where it started; None without a
            global c. An upper bound, usually far from what is needed.
        num_evaluations: evaluations of f and products with its Jacobian, measurement included.
        status: an :class:`InversionStatus`.
        observed_rate: the largest ‖f(x) − f(x′)‖/‖x − x′‖ between iterates, less rounding: an
            estimate of Lip(f) from below.
        output_error: the rounding of y that ``error_bound`` allows for.
        norm: the norm of residual, bounds, rate and tolerance.
        lipschitz_bound: the c that was claimed.
        contraction: ``global`` if c bounds Lip(f), ``causal`` if only its diagonal blocks.
        residual_dtype: the precision f was evaluated in for ``residual``.
    """

    value: Float[Tensor, "*batch tokens width"]
    residual: Float[Tensor, "*batch"]
    error_bound: Float[Tensor, "*batch"]
    num_steps: Int[Tensor, "*batch"]
    predicted_steps: Int[Tensor, "*batch"] | None
    num_evaluations: Int[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]
    observed_rate: Float[Tensor, "*batch"]
    output_error: Float[Tensor, "*batch"]
    norm: Norm
    lipschitz_bound: float | None
    contraction: Contraction
    residual_dtype: torch.dtype

    @property
    def converged(self) -> Tensor:
        """Which samples are CONVERGED."""
        return self.status == InversionStatus.CONVERGED

    def failure(self) -> str | None:
        """What failed, how badly and what to try, in one line; None if every sample converged."""
        failed = ~self.converged
        if not failed.any():
            return None
        count = [(status, int((self.status == status).sum())) for status in InversionStatus]
        kinds = [(status, n) for status, n in count if n and status != InversionStatus.CONVERGED]
        worst = self.residual[failed].nan_to_num(math.inf, math.inf).max()
        return (
            f"{int(failed.sum())} of {failed.numel()} samples were not inverted "
            f"({', '.join(f'{n} {status.name}' for status, n in kinds)}): worst residual "
            f"{float(worst):.1e} in {self.norm} after {int(self.num_steps.max())} steps"
            f"{self._prediction()}. " + "; ".join(ADVICE[status] for status, _ in kinds)
        )

    def _prediction(self) -> str:
        if self.predicted_steps is None:
            return ""
        most = int(self.predicted_steps.max())
        return f" (c = {self.lipschitz_bound} predicts at most {most} Picard steps)"


class FixedPointError(RuntimeError):
    """Some samples could not be inverted; ``solution`` has all there is to know."""

    def __init__(self, solution: FixedPointSolution) -> None:
        super().__init__(solution.failure())
        self.solution = solution
