"""Products with the Jacobian of feed-forwards, and local bounds, of several at once."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.feed_forward import bounds
from invformer.branches.feed_forward.activations import ACTIVATIONS, activation_slope
from invformer.branches.jacobian import (
    PER_SPECTRAL_NORM,
    Chosen,
    Measured,
    Products,
    StackedMaps,
    take,
)
from invformer.numerics.token_shift import windows


class StackedFeedForward(StackedMaps):
    """φ(x W + b) V, x with the tokens before it where the kernel sees them."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W, V and b."""
        return weights.w_in, weights.w_out, weights.b_in

    def read(self, u: Tensor) -> Tensor:
        """The tokens that hidden units see."""
        return windows(super().read(u), self.weights[0].kernel)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """φ(z); z is kept."""
        self.points.append((z,))
        return ACTIVATIONS[self.branches[0].activation](z)

    def rows(self, chosen: Chosen, diagonal: bool = False) -> Products:
        """Of the token alone, unless hidden units see others that count: then automatically."""
        if self.weights[0].kernel > 1 and not diagonal:
            return super().rows(chosen)
        (z,) = self.stacked_points()
        slope = activation_slope(self.branches[0].activation, take(z, chosen).flatten(1, 2))
        inner = Products(
            lambda dz: dz.squeeze(2).mul_(slope), lambda dh: dh.mul_(slope).unsqueeze(2)
        )
        return self.of_maps(inner, chosen, alone=True)

    def local_bound(
        self, measured: Measured, tight: bool, point: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Float[Tensor, "sequences"]:
        """As :meth:`.StackedMaps.local_bound`: of every lag, added up."""
        slope = activation_slope(self.branches[0].activation, point[0])
        by_lag, w_out = bounds.without_sharpness(bounds.FeedForwardWeights(*weights))
        lags = by_lag[:1] if measured == "diagonal_block" else by_lag
        hidden, width = w_out.shape
        work = len(lags) * width**2 * (hidden + PER_SPECTRAL_NORM * width)
        exact = tight and self.affords(work)
        bound = bounds.exact_local_bound if exact else bounds.fast_local_bound
        return torch.stack([bound(slope, w, w_out) for w in lags]).sum(0)
