"""Proven local bounds of every branch at a probe's text, those of one kind together."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds import bounded, local
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.attention import TiedL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.feed_forward import ContractiveFeedForward, without_sharpness


@torch.no_grad()
def local_bounds(probe: LipschitzProbe) -> Float[Tensor, "branches"]:
    """Upper bounds on what the probe estimates, the largest over the sequences, in float64.

    Where no local bound is known, that of the normalisation stands in; inf for baselines. Cost:
    eigenvalue problems of the size of a head for every token, in as many launches at any depth.
    """
    bounds = torch.full_like(probe.targets, torch.inf)
    for part, jacobians in zip(probe.parts, probe.jacobians(), strict=True):
        bound = bound_of(part.branches[0], probe.measured)
        if jacobians.at is not None and bound is not None:
            bounds[part.layers] = torch.vmap(bound)(*jacobians.at).amax(-1)
    return torch.minimum(bounds, probe.bounds())  # what holds everywhere holds here


def bound_of(branch: Any, measured: str) -> Callable[..., Tensor] | None:
    """The local bound of one branch, as a function of ``Jacobians.at``."""
    if measured == "entry_max":
        return None
    diagonal = measured == "diagonal_block"

    def l2(q: Tensor, p: Tensor, weights: Any) -> Tensor:
        if measured == "frobenius":
            return local.fast_local_bound(q, p, weights.w_q, weights.g)
        return local.token_max_local_bound(q, p, weights.w_q, weights.g, diagonal)

    def in_ball(at: Any, weights: Any) -> Tensor:
        given = at, weights.w_qkv, weights.g, branch.strictly_causal
        if measured == "frobenius":
            return bounded.frobenius_local_bound(*given)
        return bounded.token_max_local_bound(*given, diagonal)

    def feed_forward(slope: Tensor, weights: Any) -> Tensor:
        by_lag, w_out = without_sharpness(weights)
        lags = by_lag[:1] if diagonal else by_lag
        return torch.stack([local.feed_forward_fast_bound(slope, w, w_out) for w in lags]).sum(0)

    match branch:
        case TiedL2Attention():
            return l2
        case BoundedAttention():
            return in_ball
        case ContractiveFeedForward():
            return feed_forward
    return None
