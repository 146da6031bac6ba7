"""How far the input of a model's stack can move before a prediction changes, proven.

    m_ij = logit_y − logit_j,   radius_i = min_j m_ij / (‖W_y − W_j‖₂ L)

for a position i with a correct prediction y: L bounds how far what the head reads moves, and W_y is
the head's row of character y. All in float64, rounded down.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from invformer.nn.certificate import certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.rounding import product_up, quotient_up, sqrt_up

INWARD = 1 - 1e-12  # a radius is rounded down, a perturbation stays inside its ball
ROUNDING = 1e-11  # of the logits in float64, relative to the largest: no margin below it counts


def feature_constant(model: CharTransformer) -> float:
    """L with ‖z_i − z′_i‖₂ ≤ L max_j ‖x_j − x′_j‖₂, z what the head of a certified model reads."""
    total = certify(model, "token_max", dtype=torch.float64).total
    assert total is not None
    return product_up(total, read_out_constant(model))


def read_out_constant(model: CharTransformer) -> float:
    """Lipschitz constant of what stands between the stack and the head, per token.

    Lip(LayerNorm) ≤ max|γ|/√ε (docs/numerics.md §9): 316 at ε = 1e-5.
    """
    norm: nn.Module = model.norm
    if not isinstance(norm, nn.LayerNorm):
        return 1.0
    return product_up(norm.weight.abs().max().item(), sqrt_up(quotient_up(1, norm.eps)))


def certified_radii(
    model: CharTransformer,
    logits: Float[Tensor, "windows tokens vocab"],
    correct: Bool[Tensor, "windows tokens"],
    constant: float,
) -> Float[Tensor, "windows tokens"]:
    """min_j (logit_y − logit_j)/(‖W_y − W_j‖₂ L), rounded down; 0 where y is not correct.

    No perturbation of the sequence shorter than this in token_max changes the prediction at the
    position. ``constant`` is L, from the stack's input to what the head reads.
    """
    best, y = logits.max(-1)
    distances = torch.cdist(
        model.head.weight, model.head.weight, compute_mode="donot_use_mm_for_euclid_dist"
    )
    gaps = best.unsqueeze(-1) - logits - ROUNDING * logits.abs().amax()
    radii = (gaps / (distances[y] * constant)).scatter(-1, y.unsqueeze(-1), torch.inf)
    return torch.where(correct, radii.amin(-1).clamp_min(0) * INWARD, 0.0)
