"""Lipschitz constants of layers that act on one token at a time, of several layers at once.

A map applied to every token with constant L in ‖·‖₂ has the constant L in token_max and frobenius
alike; entry_max needs its own formulas. Weights are (in, out), the transpose of
``torch.nn.Linear.weight``. Results are Python floats, rounded up.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.norms import Norm, unknown_norm
from invformer.numerics.rounding import product_up, round_up
from invformer.numerics.spectral_norm import spectral_norm_bound

# sup |φ′|, rounded up. GELU attains 1.12890414… at √2, SiLU 1.09983932… at 2.39935… (1.12 and 1.1
# are in circulation; the first is too small).
ACTIVATION_SLOPE = {"relu": 1.0, "tanh": 1.0, "gelu": 1.1289042, "silu": 1.0998394}


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


def row_sum_bound(w: Float[Tensor, "m n"]) -> float:
    """‖W‖_∞ = max_i Σ_j |W_ij|, computed in float64 and rounded up."""
    sums = w.detach().to(torch.float64).abs().sum(-1)
    return round_up(sums.amax().item(), w.shape[-1])
