"""Estimates, local bounds and bounds of every branch, side by side, one norm at a time."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.lipschitz.branch_jacobians import residual_branches
from invformer.lipschitz.probe import LipschitzProbe, Measured
from invformer.lipschitz.tracking import TrackedNorm
from invformer.nn.branch import LipschitzBranch, frozen_weights
from invformer.nn.certificate import as_branches, certified_branches, certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Norm

Row = dict[str | tuple[str, ...], Tensor | float]
NORMS_MEASURED: tuple[TrackedNorm, ...] = ("token_max", "frobenius")
# Tokens that each step of an evaluation looks at besides the largest (see Tracker).
SCOUTS = 4
# Estimates are products in float32; a gain computed there may exceed the exact one by this much.
ROUNDING = 5e-5


def lipschitz_row(probe: LipschitzProbe) -> Row:
    """One step's metrics, in one vector on the device.

    Per norm and branch ``estimate`` (largest over the probe's sequences) and ``bound`` (what the
    normalisation guarantees); per norm ``estimate_max``, ``bound_max``, ``slack`` (the least
    bound/estimate of any branch, at least one) and ``converged_fraction``. Under a causal
    certificate ``own_token``, the largest ‖∂f_i/∂x_i‖₂, stands next to the norms.
    """
    looks = probe.look()
    names = tuple(name for look in looks for name in look.names)
    branches = as_branches(probe.model)
    keys: list[str] = []
    parts: list[Tensor] = []
    by_norm = [look.by_norm(probe.norms) for look in looks]
    for norm in by_norm[0]:
        found = [of_look[norm] for of_look in by_norm]
        prefix = f"lipschitz/{norm}"
        values = torch.cat([e.value.amax(-1) for e in found]).double()
        converged = torch.cat([e.converged.flatten() for e in found]).double().mean()
        keys += [f"{prefix}/{name}/estimate" for name in names]
        keys += [f"{prefix}/estimate_max", f"{prefix}/converged_fraction"]
        parts += [values, values.amax(0, keepdim=True), converged[None]]
        bounds = {name: constructed_bound(b, norm) for name, b in branches.items()}
        known = {name: bound for name, bound in bounds.items() if bound is not None}
        if known:
            bound = torch.stack([known[name] for name in names if name in known])
            of_known = [v for name, v in zip(names, values, strict=True) if name in known]
            keys += [f"{prefix}/{name}/bound" for name in names if name in known]
            keys += [f"{prefix}/bound_max", f"{prefix}/slack"]
            parts += [
                bound,
                bound.amax(0, keepdim=True),
                (bound / torch.stack(of_known)).amin(0, keepdim=True),
            ]
    row: Row = {tuple(keys): torch.cat(parts)}
    if branches:
        row["lipschitz/target"] = max(b.lipschitz_target for b in branches.values())
    return row


def constructed_bound(branch: LipschitzBranch, norm: Measured) -> Tensor | None:
    """What the normalisation guarantees of a branch."""
    if norm == "own_token":
        return branch.own_token_by_construction()
    return branch.bound_by_construction(norm)


def local_bound_row(model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"]) -> Row:
    """The cheap local bounds of every branch at a text, for one step's metrics."""
    return {
        f"lipschitz/{norm}/{name}/local_bound": bound.max()
        for norm, branches in local_bounds(model, tokens).items()
        for name, bound in branches.items()
    }


def measured_branches(
    model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"], num_steps: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Per norm and branch: converged estimate ≤ local bound ≤ certified bound, at a text.

    ``local_bound`` and ``bound`` are None where nothing is proven (baselines).

    Raises:
        CertificateViolation: an estimate above a bound, or a local bound above a certified one, in
            the same norm.
    """
    probe = LipschitzProbe(model, tokens, NORMS_MEASURED, num_steps, scouts=SCOUTS)
    report: dict[str, dict[str, dict[str, Any]]] = {}
    local = local_bounds(model, tokens, tight=True)
    for norm, estimates in probe.estimate().items():
        if norm == "own_token":
            bounds, local_of = certify(model).per_branch, {}
        else:
            bounds, local_of = certified_branches(model, norm), local[norm]
        report[norm] = {
            name: {
                "estimate": e.value.max().item(),
                "local_bound": local_of[name].max().item() if name in local_of else None,
                "bound": bounds.get(name),
                "residual": e.residual.max().item(),
                "converged": bool(e.converged.all()),
            }
            for name, e in estimates.items()
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
    if not model.is_invertible:
        return found
    with frozen_weights(model):
        for name, branch, x in residual_branches(model, model.embedding(tokens)):
            assert isinstance(branch, LipschitzBranch)
            for norm in NORMS_MEASURED:
                if branch.has_one_local_bound and norm != NORMS_MEASURED[0]:
                    found[norm][name] = found[NORMS_MEASURED[0]][name]
                else:
                    found[norm][name] = branch.local_bound(x, norm, tight)
    return found
