"""The transposed equation w + Jᵀw = v of an inverse's gradient, for a contraction's Jacobian J."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from invformer.numerics.error_bound import contraction_error_bound
from invformer.numerics.fixed_point_solution import (
    FixedPointError,
    FixedPointSolution,
    InversionStatus,
)
from invformer.numerics.norms import Norm, Tokens, dual_norm
from invformer.numerics.precision import RESIDUAL_FLOOR, at_least_single
from invformer.numerics.residual_equation import (
    MOST_PREDICTED_STEPS,
    STEPS_WITHOUT_PREDICTION,
    Kind,
    comfortable_rtol,
)


def solve_transposed(
    pull_back: Callable[[Tokens], Tokens],
    v: Tokens,
    *,
    lipschitz_bound: float,
    norm: Norm,
    kind: Kind = "global",
    rtol: float | None = None,
    max_steps: int | None = None,
    throw: bool = True,
) -> FixedPointSolution:
    """The w with w + Jᵀw = v, by w ← v − Jᵀw from w = v.

    ‖Jᵀ‖ = ‖J‖ ≤ c in the dual norm (:func:`.dual_norm`), so the iteration contracts in it at
    the rate of the forward one; diagonal blocks of Jᵀ are those of J, transposed, so it converges
    for a causal c, too. A sample has converged if ‖v − w − Jᵀw‖ ≤ (1 − c) rtol ‖w‖ in the dual
    norm, and keeps its w from then on.

    Args:
        pull_back: w ↦ Jᵀw of each sample, for samples like v.
        lipschitz_bound: c < 1, proven for J in ``norm``.
        rtol, max_steps, throw: as in :func:`.invert_residual`.

    Returns:
        w, with residuals and error bounds in the dual norm, without the rounding of Jᵀw.

    Raises:
        FixedPointError: ``throw`` and some sample did not converge.
    """
    c, least = lipschitz_bound, RESIDUAL_FLOOR[v.dtype] / (1 - lipschitz_bound)
    rtol = rtol or comfortable_rtol(least, c)
    if max_steps is None:
        max_steps = STEPS_WITHOUT_PREDICTION
        if kind == "global":  # cᵏ ‖Jᵀv‖ ≤ (1 − c) rtol ‖w‖/4
            predicted = math.log((1 - c) * rtol / 4) / math.log(max(c, 1e-300))
            max_steps = 2 * min(math.ceil(predicted), MOST_PREDICTED_STEPS) + 10

    def length(x: Tokens) -> Tensor:
        return dual_norm(at_least_single(x), norm).double()

    w, pulled = v, pull_back(v)
    num_steps = torch.zeros(v.shape[:-2], dtype=torch.long, device=v.device)
    while True:
        residual, size = length(v - w - pulled), length(w)
        open_ = ~(residual <= (1 - c) * rtol * size) & (residual + size < math.inf)
        open_ &= num_steps < max_steps
        if not bool(open_.any()):
            break
        w = torch.where(open_[..., None, None], v - pulled, w)
        num_steps += open_
        pulled = pull_back(w)
    status = torch.where(residual <= (1 - c) * rtol * size, 0, int(InversionStatus.MAX_STEPS))
    status[~(residual + size < math.inf)] = InversionStatus.NONFINITE
    error = contraction_error_bound(residual, c if kind == "global" else math.inf)
    solution = FixedPointSolution(
        value=w,
        residual=residual,
        error_bound=error.masked_fill(status != InversionStatus.CONVERGED, math.inf),
        num_steps=num_steps,
        num_evaluations=num_steps + 1,
        status=status,
        norm=norm,
    )
    if throw and not bool(solution.converged.all()):
        raise FixedPointError(solution, "gradients of samples were not found")
    return solution
