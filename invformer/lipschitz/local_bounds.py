"""Proven local bounds of every branch at a probe's text, those of one kind together."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds import bounded, local
from invformer.lipschitz.attention_jacobians import StackedBoundedAttention, StackedL2Attention
from invformer.lipschitz.jacobians import StackedBranches, StackedFeedForward
from invformer.lipschitz.probe import LipschitzProbe, Measured, stacked_class
from invformer.nn.branch import LipschitzBranch
from invformer.nn.feed_forward import FeedForwardWeights, without_sharpness
from invformer.nn.residual import ResidualWeights
from invformer.numerics.bounded_attention import AttentionPoint

# Multiplications in float64 that a tight bound of one branch may take: some seconds.
MOST_TIGHT = 2e11
# Multiplications of a certified spectral norm of a D × D matrix, in D³; norms for each token in a
# tight bound of attention.
PER_SPECTRAL_NORM, NORMS_PER_TOKEN = 10, 6


@torch.no_grad()
def local_bounds(probe: LipschitzProbe, tight: bool = False) -> Float[Tensor, "branches"]:
    """Upper bounds on what the probe estimates, the largest over the sequences, in float64.

    inf where none is known. Cost: eigenvalue problems of the size of a head for every token, in as
    many launches at any depth. ``tight`` spends an eigenproblem or a spectral norm of D × D
    matrices per token, branch by branch, unless that takes too long.
    """
    bounds = torch.full_like(probe.targets, torch.inf)
    for part, stacked in zip(probe.parts, probe.stacked(), strict=True):
        bounds[part.layers] = bounds_of(stacked, probe.measured, tight)
    return bounds


def local_bound(
    branch: LipschitzBranch,
    x: Float[Tensor, "sequences tokens width"],
    measured: Measured,
    tight: bool = False,
) -> float:
    """The same for one branch at an input of its own, and never above its Lipschitz bound."""
    stacked = stacked_class(branch)([branch], [ResidualWeights(branch.weights())], x.shape[-2])
    stacked.forward(x)
    bound = bounds_of(stacked, measured, tight).item()
    # What holds everywhere holds here.
    return bound if measured == "diagonal_block" else min(bound, branch.lipschitz_bound(measured))


def bounds_of(stacked: StackedBranches, measured: Measured, tight: bool = False) -> Tensor:
    """The local bounds of stacked branches, the largest over the sequences."""
    diagonal = measured == "diagonal_block"
    if measured == "entry_max":
        return torch.full((len(stacked.inputs),), torch.inf)

    def of_l2(q: Tensor, p: Tensor, w_q: Tensor, g: Tensor) -> Tensor:
        if measured != "frobenius":
            return local.token_max_local_bound(q, p, w_q, g, diagonal)
        work = NORMS_PER_TOKEN * PER_SPECTRAL_NORM * g.shape[-1] ** 3
        bound = local.tight_local_bound if affordable(work) else local.fast_local_bound
        return bound(q, p, w_q, g)

    def of_bounded(*at: Tensor) -> Tensor:
        *point, w_qkv, g = at
        strict = stacked.branches[0].strictly_causal
        return bounded.local_bound(AttentionPoint.of(*point), w_qkv, g, measured, strict, tight)

    def of_feed_forward(slope: Tensor, *weights: Tensor) -> Tensor:
        by_lag, w_out = without_sharpness(FeedForwardWeights(*weights))
        lags = by_lag[:1] if diagonal else by_lag
        hidden, width = w_out.shape
        work = len(lags) * width**2 * (hidden + PER_SPECTRAL_NORM * width)
        exact, fast = local.feed_forward_local_bound, local.feed_forward_fast_bound
        bound = exact if affordable(work) else fast
        return torch.stack([bound(slope, w, w_out) for w in lags]).sum(0)

    def affordable(per_token: float) -> bool:
        return tight and per_token * stacked.inputs[0][..., 0].numel() <= MOST_TIGHT

    bound: Callable[..., Tensor]
    match stacked:
        case StackedL2Attention():
            bound = of_l2
        case StackedBoundedAttention():
            bound = of_bounded
        case StackedFeedForward():
            bound = of_feed_forward
        case _:
            return torch.full((len(stacked.inputs),), torch.inf)
    if tight:
        return torch.stack([bound(*each) for each in zip(*stacked.evidence(), strict=True)]).amax(
            -1
        )
    return torch.vmap(bound)(*stacked.evidence()).amax(-1)
