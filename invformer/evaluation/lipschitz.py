"""Estimates, local bounds and bounds of every branch, side by side, one norm at a time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise

from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.lipschitz.probe import LipschitzProbe, certified_in
from invformer.nn.certificate import NoCertificateError
from invformer.nn.proof import certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Norm
from invformer.processes.bar import Bar

NORMS_MEASURED: tuple[Norm, ...] = ("token_max", "frobenius")
# Estimates and local bounds take the same numbers in float32, whose rounding may differ by this.
ROUNDING = 5e-5
# Squares of smaller numbers leave float32's range.
UNDERFLOW = 2.0**-60
# Residual of an estimate from which another step adds next to nothing.
CONVERGED = 0.1


@dataclass(frozen=True)
class BranchConstants:
    """Constants of one branch at a text: estimate ≤ local bound ≤ bound."""

    estimate: float
    local_bound: float | None  # None where nothing is proven (baselines)
    bound: float | None
    residual: float  # of the estimate
    converged: bool


def measured_branches(
    model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"], num_steps: int
) -> dict[str, dict[str, BranchConstants]]:
    """Per norm and branch: converged estimate ≤ local bound ≤ certified bound, at a text.

    A norm in which a branch that contracts has no bound is left out. The order is checked:
    :func:`require_sandwich`.
    """
    report: dict[str, dict[str, BranchConstants]] = {}
    causal = ("diagonal_block",) if certified_in(model) == "diagonal_block" else ()
    norms = (*NORMS_MEASURED, *causal)
    for norm in Bar(norms, desc="local Lipschitz constants", unit="norms"):
        bounds: dict[str, float] = {}
        if norm == "diagonal_block":
            bounds = certify(model).per_branch
        elif model.is_invertible:
            try:
                bounds = certify(model, norm, kind="global").per_branch
            except NoCertificateError:  # some branch has no theorem in this norm
                continue
        probe = LipschitzProbe(model, tokens, norm, thorough=True)
        stacked = probe.stacked()
        local = dict(zip(probe.names, probe.local_bounds(True, stacked).tolist(), strict=True))
        report[norm] = {
            name: BranchConstants(
                estimate=value.max().item(),
                local_bound=min(local[name], bounds[name]) if name in bounds else None,
                bound=bounds.get(name),
                residual=residual.max().item(),
                converged=bool((residual <= CONVERGED).all()),
            )
            for name, (value, residual) in probe.estimate(num_steps, stacked).items()
        }
        for name, row in report[norm].items():
            require_sandwich(f"{norm}/{name}", asdict(row))
    return report


def require_sandwich(where: str, row: Mapping[str, float | None]) -> None:
    """Raise CertificateViolation unless estimate ≤ local bound ≤ bound ≤ target, all in one norm.

    What is None claims nothing.
    """
    keys = ("estimate", "local_bound", "bound", "target")
    present = [(key, value) for key in keys if (value := row.get(key)) is not None]
    for (low, below), (high, above) in pairwise(present):
        if below > above * (1 + ROUNDING) + UNDERFLOW:
            raise CertificateViolation(f"{where}: {low} {below} exceeds {high} {above}")
