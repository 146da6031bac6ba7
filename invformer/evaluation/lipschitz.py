"""Estimates, local bounds and bounds of every branch, side by side, one norm at a time."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.lipschitz.jacobians import residual_branches
from invformer.lipschitz.probe import LipschitzProbe, certified_in
from invformer.nn.branch import LipschitzBranch
from invformer.nn.certificate import certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Norm

NORMS_MEASURED: tuple[Norm, ...] = ("token_max", "frobenius")
# Estimates are products in float32; a gain computed there may exceed the exact one by this much.
ROUNDING = 5e-5


def measured_branches(
    model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"], num_steps: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Per norm and branch: converged estimate ≤ local bound ≤ certified bound, at a text.

    ``local_bound`` and ``bound`` are None where nothing is proven (baselines).

    Raises:
        CertificateViolation: an estimate above a bound, or a local bound above a certified one, in
            the same norm.
    """
    report: dict[str, dict[str, dict[str, Any]]] = {}
    local = local_bounds(model, tokens, tight=True)
    causal = ("diagonal_block",) if certified_in(model) == "diagonal_block" else ()
    for norm in (*NORMS_MEASURED, *causal):
        probe = LipschitzProbe(model, tokens, norm)
        bounds, local_of = {}, {}
        if norm == "diagonal_block":
            bounds = certify(model).per_branch
        elif model.is_invertible:
            dtype = model.embedding.position.dtype
            bounds, local_of = certify(model, norm, dtype, "global").per_branch, local[norm]
        report[norm] = {
            name: {
                "estimate": e.value.max().item(),
                "local_bound": local_of[name].max().item() if name in local_of else None,
                "bound": bounds.get(name),
                "residual": e.residual.max().item(),
                "converged": bool(e.converged.all()),
            }
            for name, e in probe.estimate(num_steps).items()
        }
        for name, row in report[norm].items():
            require_sandwich(f"{norm}/{name}", row)
    return report


def require_sandwich(where: str, row: Mapping[str, float | None]) -> None:
    """estimate ≤ local bound ≤ bound, all in one norm; what is None claims nothing.

    Raises:
        CertificateViolation: naming both numbers. It is a bug, never noise.
    """
    known = [(key, row.get(key)) for key in ("estimate", "local_bound", "bound")]
    present = [(key, value) for key, value in known if value is not None]
    for (low, below), (high, above) in pairwise(present):
        if below > above * (1 + ROUNDING):
            raise CertificateViolation(f"{where}: {low} {below} exceeds {high} {above}")


@torch.no_grad()
def local_bounds(
    model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"], tight: bool = False
) -> dict[Norm, dict[str, Tensor]]:
    """Proven local bounds of every branch at some sequences, per norm; nothing for baselines."""
    found: dict[Norm, dict[str, Tensor]] = {norm: {} for norm in NORMS_MEASURED}
    weights = model.weights()
    if weights is None:
        return found
    for name, branch, x in residual_branches(model, model.embedding(tokens), weights):
        assert isinstance(branch, LipschitzBranch)
        for norm in NORMS_MEASURED:
            if branch.has_one_local_bound and norm != NORMS_MEASURED[0]:
                found[norm][name] = found[NORMS_MEASURED[0]][name]
            else:
                found[norm][name] = branch.local_bound(x, norm, tight, weights[name].branch)
    return found
