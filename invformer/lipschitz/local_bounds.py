"""Proven local bounds of every branch at a probe's text, those of one kind together."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.branch import LipschitzBranch
from invformer.branches.feed_forward.feed_forward import (
    FeedForwardWeights,
    activation_slope,
    without_sharpness,
)
from invformer.branches.in_ball import bounds as bounded
from invformer.branches.tied_l2 import local_bounds as local
from invformer.lipschitz import jacobians
from invformer.lipschitz.probe import LipschitzProbe, Measured
from invformer.nn.residual import InvertibleResidual, ResidualWeights
from invformer.numerics.ball import AttentionPoint
from invformer.numerics.l2_attention import split_heads

# Multiplications in float64 that a tight bound of one branch may take: some seconds.
MOST_TIGHT = 2e11
# Multiplications of a certified spectral norm of a D × D matrix, in D³; norms for each token in a
# tight bound of attention.
PER_SPECTRAL_NORM, NORMS_PER_TOKEN = 10, 6


@torch.no_grad()
def local_bounds(probe: LipschitzProbe, tight: bool = False) -> Float[Tensor, "branches"]:
    """Upper bounds on what the probe estimates, the largest over the sequences, in float64.

    inf where none is known. Cost: a spectral norm of the size of a head for every token, in as many
    launches at any depth. ``tight`` spends an eigenproblem or a spectral norm of D × D
    matrices per token, branch by branch, unless that takes too long.
    """
    bounds = [bounds_at(at_text, probe.measured, tight).double() for at_text in probe.stacked()]
    return torch.stack(bounds, -1).flatten()


def local_bound(
    branch: LipschitzBranch,
    x: Float[Tensor, "sequences tokens width"],
    measured: Measured,
    tight: bool = False,
) -> float:
    """The local bound of one branch at an input of its own, never above its Lipschitz bound."""
    layers, weights = [InvertibleResidual(branch)], [ResidualWeights(branch.weights())]
    alone = jacobians.stacked_class(branch)(layers, weights, x.shape[-2])
    alone.forward(x)
    bound = bounds_at(alone, measured, tight).item()
    # What holds everywhere holds here.
    return bound if measured == "diagonal_block" else min(bound, branch.lipschitz_bound(measured))


def bounds_at(at: jacobians.StackedBranches, measured: Measured, tight: bool = False) -> Tensor:
    """The local bounds of stacked branches, the largest over the sequences."""
    diagonal = measured == "diagonal_block"
    unknown = at.inputs[0].new_full((len(at.inputs),), torch.inf)
    if measured == "entry_max":
        return unknown

    def of_l2(z: Tensor, p: Tensor, w_q: Tensor, g: Tensor) -> Tensor:
        q = split_heads(z - z[..., :1, :], len(g))  # relative to the first token
        if measured != "frobenius":
            return local.token_max_local_bound(q, p, w_q, g, diagonal)
        work = NORMS_PER_TOKEN * PER_SPECTRAL_NORM * g.shape[-1] ** 3
        bound = local.tight_local_bound if affordable(work) else local.fast_local_bound
        return bound(q, p, w_q, g)

    def of_bounded(*evidence: Tensor) -> Tensor:
        *point, w_qkv, _, g = evidence
        how = measured, at.branches[0].strictly_causal, tight
        return bounded.local_bound(AttentionPoint(*point), w_qkv, g, *how)

    def of_feed_forward(z: Tensor, *weights: Tensor) -> Tensor:
        slope = activation_slope(at.branches[0].activation, z)
        by_lag, w_out = without_sharpness(FeedForwardWeights(*weights))
        lags = by_lag[:1] if diagonal else by_lag
        hidden, width = w_out.shape
        work = len(lags) * width**2 * (hidden + PER_SPECTRAL_NORM * width)
        exact, fast = local.feed_forward_local_bound, local.feed_forward_fast_bound
        bound = exact if affordable(work) else fast
        return torch.stack([bound(slope, w, w_out) for w in lags]).sum(0)

    def affordable(per_token: float) -> bool:
        return tight and per_token * at.inputs[0][..., 0].numel() <= MOST_TIGHT

    of_kind: dict[type, Callable[..., Tensor]] = {
        jacobians.StackedL2Attention: of_l2,
        jacobians.StackedBoundedAttention: of_bounded,
        jacobians.StackedFeedForward: of_feed_forward,
    }
    bound = of_kind.get(type(at))
    if bound is None:
        return unknown
    evidence = at.stacked_points() + [torch.stack(each) for each in zip(*at.weights, strict=True)]
    if tight:
        return torch.stack([bound(*each) for each in zip(*evidence, strict=True)]).amax(-1)
    return torch.vmap(bound)(*evidence).amax(-1)
