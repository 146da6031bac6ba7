"""From the gains of single heads to the constant of F(X)_i = Σ_h Y_i^h G_h.

Any positive weight per head gives a valid bound. A few choices are tried, the least is returned.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.rounding import product_up, quotient_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

InputMaps = Float[Tensor, "heads width d_head"]
OutputMaps = Float[Tensor, "heads d_head width"]


def separate_inputs(gains: list[float], g: Tensor, sizes: list[float]) -> float:
    """‖Σ_h G_hᵀ y_h‖ ≤ min_w ‖[a_h G_h/w_h]_h‖₂ √(Σ_h w_h²) for all y_h with ‖y_h‖ ≤ a_h.

    Heads may move independently, because they may attend to different tokens. w_h = 1 gives
    √H ‖[a_h G_h]_h‖₂; w_h² = a_h ‖G_h‖₂, the ``sizes``, gives no more than Σ_h a_h ‖G_h‖₂.
    """
    by_size = [math.sqrt(a * out) for a, out in zip(gains, sizes, strict=True)]
    choices = [_usable([1.0] * len(gains)), _usable(by_size)]
    scales = [list(map(quotient_up, gains, weights)) for weights in choices]
    totals = [sqrt_up(sum_up(*map(product_up, weights, weights))) for weights in choices]
    return min(map(product_up, _stacked_norms(scales, g, dim=-2), totals))


def shared_input(
    gains: list[float], w: Tensor, g: Tensor, known: list[float] | None = None
) -> float:
    """‖Σ_h G_hᵀ B_h W_hᵀ‖₂ ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(a_h/s_h) W_h]_h‖₂ for all ‖B_h‖₂ ≤ a_h.

    All heads read one input: no √H. Tried are s_h = a_h ‖W_h‖₂, s_h² = a_h ‖W_h‖₂/‖G_h‖₂ and the
    weights ``known``.
    """
    before = [a * q for a, q in zip(gains, spectral_norm_bound(w).tolist(), strict=True)]
    heads = zip(before, spectral_norm_bound(g).tolist(), strict=True)
    by_size = [math.sqrt(a / out) if out else math.inf for a, out in heads]
    choices = [_usable(s) for s in (before, by_size, *([] if known is None else [known]))]
    scales = [list(map(quotient_up, gains, s)) for s in choices]
    after, stacked = _stacked_norms(choices, g, dim=-2), _stacked_norms(scales, w, dim=-1)
    return min(map(product_up, after, stacked))


def _stacked_norms(choices: list[list[float]], blocks: Tensor, dim: int) -> list[float]:
    """‖[a_h W_h]_h‖₂ from above for several a, side by side (dim = −1) or one on the other (−2).

    Scaling rounds every entry by at most 2⁻⁵³ of itself, so it moves ‖·‖₂ by at most 2⁻⁵³ ‖·‖_F,
    which is at most 2⁻⁵³ √rank ‖·‖₂.
    """
    scale = blocks.new_tensor(choices, dtype=torch.float64)[..., None, None]
    joined = torch.cat((blocks.detach().to(torch.float64) * scale).unbind(1), dim=dim)
    operations = 1 + math.isqrt(min(joined.shape[-2:]))
    return [round_up(norm, operations) for norm in spectral_norm_bound(joined).tolist()]


def _usable(weights: list[float]) -> list[float]:
    """The weights, made positive and finite, within 1e250 of the largest finite one.

    A head with a tiny input map has an output map that was divided by it. Its weight is far below
    the others, and has to stay there.
    """
    largest = max((w for w in weights if 0 < w < math.inf), default=1.0)
    return [min(max(w, 1e-250 * largest), 1e250 * largest) for w in weights]
