"""Following a slowly changing local Lipschitz constant: one pair of products per look."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.linear_map import LinearMap
from invformer.numerics.local_lipschitz import LipschitzEstimate
from invformer.numerics.norms import Norm, dual_vector, maximiser, stationarity, vector_norm


@dataclass(frozen=True)
class Tracking:
    """One look at a Jacobian in several norms.

    Attributes:
        estimates: per norm, the gain of the vector that was handed in: ≤ ‖J‖ in that norm.
        vectors: where to look next, (norms, *batch, N, D).
    """

    estimates: tuple[LipschitzEstimate, ...]
    vectors: Float[Tensor, "norms *batch tokens width"]


def track(
    jacobian: LinearMap,
    vectors: Float[Tensor, "norms *batch tokens width"],
    norms: tuple[Norm, ...],
    rtol: float = 0.1,
) -> Tracking:
    """‖Jx‖/‖x‖ for one x per norm, and x⁺ = argmax_{‖z‖ = 1} ⟨Jᵀa, z⟩ for the next look.

    The (nonlinear) power method of ``power_iteration_estimate`` taken one step at a time, while J
    moves under it: all norms share one product with J and one with Jᵀ. The value is a true lower
    bound at every look; it follows ‖J‖ with the delay of power iteration.

    Args:
        jacobian: J; its products must broadcast over a further leading dimension.
        vectors: x for every norm, of norm one in it, such as the last look's ``vectors``.
        norms: the norms, in the order of ``vectors``.
        rtol: residual below which a sample counts as converged.

    Returns:
        The estimates, with residuals that belong to the same vectors, and the next vectors.

    Source: as ``power_iteration_estimate``; following a moving target is ours.
    """
    outputs = jacobian.jvp(vectors)
    duals = torch.stack([dual_vector(o, norm) for o, norm in zip(outputs, norms, strict=True)])
    pulled = jacobian.vjp(duals)
    estimates, following = [], []
    for x, o, w, norm in zip(vectors, outputs, pulled, norms, strict=True):
        gain = vector_norm(o, norm) / vector_norm(x, norm)
        residual = stationarity(x, w, gain, norm)
        estimates.append(LipschitzEstimate(gain, residual, 1, residual <= rtol, norm, x))
        following.append(maximiser(w, norm, otherwise=x))
    return Tracking(tuple(estimates), torch.stack(following))
