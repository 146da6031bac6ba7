"""Lipschitz constants of everything that acts on one token at a time.

A map applied to every token with constant L in ‖·‖₂ has the constant L in token_max and frobenius
alike; entry_max needs its own formulas. All results are Python floats, rounded up.
"""

import math

from jaxtyping import Float
from torch import Tensor

from invformer.bounds.kim import max_row_sum
from invformer.numerics.norms import Norm
from invformer.numerics.rounding import product_up, quotient_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

# sup |φ′|, rounded up. GELU attains 1.12890414… at √2, its tanh form 1.12899306… at 1.41850…,
# SiLU 1.09983932… at 2.39935… (1.12 and 1.1 are in circulation; the first is too small).
ACTIVATION_SLOPE: dict[str, float] = {
    "relu": 1.0,
    "tanh": 1.0,
    "elu": 1.0,
    "softplus": 1.0,
    "sigmoid": 0.25,
    "gelu": 1.1289042,
    "gelu_tanh": 1.1289931,
    "silu": 1.0998394,
}


def leaky_relu_slope(negative_slope: float) -> float:
    """sup |φ′| = max(1, |a|) of φ(x) = max(x, 0) + a min(x, 0)."""
    return max(1.0, abs(negative_slope))


def feed_forward_bound(
    w_in: Float[Tensor, "width hidden"],
    w_out: Float[Tensor, "hidden width_out"],
    activation: str,
    norm: Norm,
) -> float:
    """Lip(x ↦ φ(x W₁ + b₁) W₂ + b₂) ≤ sup |φ′| · ‖W₁‖ · ‖W₂‖.

    ‖·‖ is the spectral norm in token_max and frobenius, and ‖Wᵀ‖_∞ (largest absolute sum over the
    inputs of one output) in entry_max. A sharpness β > 0 per unit, φ(βh)/β, leaves it unchanged.

    Args:
        w_in: W₁ as (in, out), acting from the right: the transpose of ``torch.nn.Linear.weight``.
        w_out: W₂ as (in, out).
        activation: a key of :data:`ACTIVATION_SLOPE`.
        norm: the norm of the answer.

    Returns:
        The bound.

    Raises:
        ValueError: no slope is known for the activation.
    """
    if activation not in ACTIVATION_SLOPE:
        known = ", ".join(ACTIVATION_SLOPE)
        raise ValueError(f"no largest slope is known for {activation!r}: choose one of {known}")
    return product_up(ACTIVATION_SLOPE[activation], *(linear_bound(w, norm) for w in (w_in, w_out)))


def linear_bound(weight: Float[Tensor, "width width_out"], norm: Norm) -> float:
    """Lip(x ↦ x W + b) = ‖W‖₂ in token_max and frobenius, ‖Wᵀ‖_∞ in entry_max.

    Args:
        weight: W as (in, out).
        norm: the norm of the answer.

    Returns:
        The bound.
    """
    return max_row_sum(weight.mT) if norm == "entry_max" else spectral_norm_bound(weight).item()


def layer_norm_bound(
    weight: Float[Tensor, "width"] | None, width: int, eps: float, norm: Norm
) -> float:
    """Lip(LayerNorm) ≤ max|γ|/√ε, times 2(D−1)/D + 2√(D−1)/(3√3) in entry_max.

    J = diag(γ)/s · (I − 11ᵀ/D − x̄x̄ᵀ/(D s²)) with x̄ = x − mean, s² = var + ε. The first bound is
    attained as var → 0 with equal γ. At ε = 1e-5 it is 316 per layer: valid, and of little use.

    Args:
        weight: γ, None for ones.
        width: D.
        eps: ε > 0.
        norm: the norm of the answer.

    Returns:
        The bound.

    Raises:
        ValueError: ε is not positive: then LayerNorm is not Lipschitz.

    Source: ours, docs/numerics.md; Kim et al. 2021, appendix N, has a looser constant in entry_max.
    """
    if not eps > 0:
        raise ValueError(f"LayerNorm is Lipschitz only for eps > 0, got {eps}")
    largest = 1.0 if weight is None else weight.detach().abs().max().item()
    bound = product_up(largest, sqrt_up(quotient_up(1, eps)))
    if norm != "entry_max":
        return bound
    centring = quotient_up(2 * (width - 1), width)
    scaling = sqrt_up(quotient_up(4 * (width - 1), 27))
    return product_up(bound, sum_up(centring, scaling))


def dropout_bound(probability: float) -> float:
    """Lip(x ↦ mask ∘ x/(1 − p)) ≤ 1/(1 − p) in every norm, for a fixed mask on a layer's output.

    Dropout on attention weights is not covered: it breaks the normalisation of the softmax.

    Args:
        probability: p in [0, 1).

    Returns:
        The bound; 1 for p = 0.

    Raises:
        ValueError: p is outside [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"dropout needs 0 <= p < 1, got {probability}")
    return 1.0 if probability == 0 else quotient_up(1, math.nextafter(1 - probability, 0))
