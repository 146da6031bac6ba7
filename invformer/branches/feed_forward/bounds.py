"""Lipschitz constants of feed-forwards: everywhere, of several layers at once, and at a text.

A map applied to every token with constant L in ‖·‖₂ has the constant L in token_max and frobenius
alike; entry_max needs its own formulas. Weights are (in, out), the transpose of
``torch.nn.Linear.weight``. Results are Python floats, rounded up.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.branch import cast
from invformer.branches.feed_forward.activations import ACTIVATION_SLOPE
from invformer.branches.rounded import outward
from invformer.numerics.norms import Norm, row_sum_bound, unknown_norm
from invformer.numerics.rounding import product_up
from invformer.numerics.spectral_norm import spectral_norm_bound

# Taking β out again rounds every entry by 2⁻⁵³ of itself, and ‖·‖₂ by √rank times that.
UNFOLDING = 1 + 2.0**-40
# Numbers in the matrices of the tokens that are multiplied at once: 64 MiB of them.
CHUNK_ELEMENTS = 2**23

Slopes = Float[Tensor, "*batch tokens hidden"]
PerSequence = Float[Tensor, "*batch"]


class FeedForwardWeights(NamedTuple):
    """The weights of f(X) = φ(X W + b) V, every constant multiplied in.

    The sharpness β is in all three: W = Ŵ₁β, b = b₁β, V = c Ŵ₂/(lip(φ) β). So it costs no pass over
    the tokens.

    Attributes:
        w_in: W as (k D, hidden): D rows for each of k tokens, a token's own first, then those
            before, nearest first.
        b_in: b as (hidden,).
        w_out: V as (hidden, D).
        sharpness: β as (hidden,).
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    sharpness: Tensor

    @property
    def kernel(self) -> int:
        """k, as of :class:`FeedForward`."""
        return self.w_in.shape[-2] // self.w_out.shape[-1]


def without_sharpness(
    weights: FeedForwardWeights, dtype: torch.dtype | None = None
) -> tuple[list[Float[Tensor, "*layers width hidden"]], Float[Tensor, "*layers hidden width"]]:
    """W₁ of every lag and W₂ as cast to ``dtype``, with β taken out in float64.

    φ(x W + b) V has the Jacobian (W/β) diag(φ′) (βV) for any β. W₂ is enlarged by the rounding of
    division and product.
    """
    w_in, w_out = (cast(w, dtype).double() for w in (weights.w_in, weights.w_out))
    sharpness = weights.sharpness.detach().double()
    by_lag = (w_in / sharpness.unsqueeze(-2)).split(w_out.shape[-1], dim=-2)
    return list(by_lag), w_out * (UNFOLDING * sharpness).unsqueeze(-1)


def feed_forward_bounds(
    w_in: Float[Tensor, "layers width hidden"],
    w_out: Float[Tensor, "layers hidden width"],
    activation: str,
    norm: Norm,
) -> list[float]:
    """Lip(x ↦ φ(x W₁ + b₁) W₂ + b₂) ≤ sup |φ′| · Lip(x ↦ x W₁) · Lip(x ↦ x W₂).

    Lip(x ↦ x W) = ‖W‖₂ in token_max and frobenius, ‖Wᵀ‖_∞ in entry_max. A sharpness β > 0 per
    hidden unit, φ(βh)/β, leaves the bound unchanged.
    """
    match norm:
        case "token_max" | "frobenius":
            maps = spectral_norm_bound(torch.stack([w_in, w_out.mT])).tolist()
        case "entry_max":
            maps = [[row_sum_bound(w.mT) for w in of_layers] for of_layers in (w_in, w_out)]
        case _:
            raise unknown_norm(norm)
    slope = ACTIVATION_SLOPE[activation]
    return [product_up(slope, *of_layer) for of_layer in zip(*maps, strict=True)]


def exact_local_bound(
    slope: Slopes, w_in: Float[Tensor, "width hidden"], w_out: Float[Tensor, "hidden width"]
) -> PerSequence:
    """max_i ‖W₁ diag(φ′_i) W₂‖₂ for x ↦ φ(x W₁ + b₁) W₂, φ′_i = φ′(x_i W₁ + b₁) the ``slope``.

    The Jacobian is block-diagonal in tokens: this is its norm in token_max and in frobenius alike.
    One D × D spectral norm a token, some tokens at a time.
    """
    w_in, w_out = w_in.double(), w_out.double()
    at_once = max(1, CHUNK_ELEMENTS // max(1, w_in.numel()))
    norms = [
        spectral_norm_bound((w_in * some.double().unsqueeze(-2)) @ w_out)
        for some in slope.flatten(0, -2).split(at_once)
    ]
    return outward(torch.cat(norms).view(slope.shape[:-1]).amax(-1), slope)


def fast_local_bound(
    slope: Slopes, w_in: Float[Tensor, "width hidden"], w_out: Float[Tensor, "hidden width"]
) -> PerSequence:
    """The same norm ≤ min(r‖W₁‖‖W₂‖, m‖W₁W₂‖ + (r₊ − r₋)/2 ‖W₁‖‖W₂‖), without per-token matrices.

    r₊ and r₋ are the largest and smallest slope in the sequence, r = max(|r₊|, |r₋|) and
    m = |r₊ + r₋|/2: the slopes are a constant plus a deviation.
    """
    w_in, w_out = w_in.double(), w_out.double()
    product = spectral_norm_bound(torch.stack([w_in, w_out.mT])).prod(0)
    lowest, highest = slope.double().flatten(-2).aminmax(dim=-1)
    largest = torch.maximum(highest.abs(), lowest.abs())
    around_middle = (highest + lowest).abs() / 2 * spectral_norm_bound(w_in @ w_out)
    split = around_middle + (highest - lowest) / 2 * product
    return outward(torch.minimum(largest * product, split), slope)
