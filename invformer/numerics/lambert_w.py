"""A mean gap and a gain, by the Lambert W function: differentiable in torch, rounded up in Python.

Both come from the Wright omega function ω(y) = W₀(eʸ), the u > 0 with u + log u = y. With n the
mass of the other visible tokens of a softmax row and φ(u) = u e^{u+1},

    φ⁻¹(n) = W₀(n/e) = ω(log n − 1),    κ′(n) = 1 + 2 W₀(n e^{−3/2}) = 1 + 2 ω(log n − 3/2)

φ⁻¹(n) is the largest mean logit gap Σ_j P_ij s_ij (Kim et al. 2021, arXiv 2006.04710, Theorem 3.2),
κ′ the largest gain of a head's diagonal block (ours, docs/numerics.md). The torch functions work
under autograd (to third order), torch.func, vmap and torch.compile, in float32 and float64. Those
with ``upper`` serve certificates: Python floats, above the true value by less than 1e-13 of it.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Newton's method below starts right of the root of a convex function, so it descends monotonically;
# five steps reach float64 rounding for every y. Gradients flow through the last two of six.
NUM_STEPS = 5
# exp(-750) is zero in float64: below it ω is zero to the last bit and so is its derivative.
LOWEST_LOG = -750.0
# Rounded up, e^{−700} stands for everything below it (and stays a normal number).
LOWEST_LOG_UPPER = -700.0
# Beyond it the margins overflow; log n of a float64 mass is at most 710.
LARGEST_LOG_UPPER = 1e300


def phi_inverse_from_log(log_n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """u = φ⁻¹(n) from log n ≥ −∞, where u = 0; du/d(log n) = u/(1 + u) ∈ [0, 1)."""
    return _omega(log_n - 1)


def causal_gain_from_log(log_n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """κ′(n) from log n ≥ −∞, where κ′ = 1. No Lipschitz constant: earlier tokens are held fixed."""
    return 1 + 2 * _omega(log_n - 1.5)


def phi_inverse_upper(log_n: float) -> float:
    """A float64 number ≥ φ⁻¹(n), from any number ≥ log n: −∞ gives 0, +∞ and NaN give inf.

    Proven by evaluating u + log u with its rounding.
    """
    return _omega_upper(log_n, shift=1.0)


def causal_gain_upper(log_n: float) -> float:
    """A float64 number ≥ κ′(n), from any number ≥ log n: −∞ gives 1, +∞ and NaN give inf."""
    if log_n == -math.inf:
        return 1.0
    return math.nextafter(1 + 2 * _omega_upper(log_n, shift=1.5), math.inf)


def _omega(y: Tensor) -> Tensor:
    """ω(y) = eᶻ with z + eᶻ = y: Newton on z, with gradients through two more steps."""
    y = y.clamp(min=LOWEST_LOG)
    with torch.no_grad():
        z = _newton(y, torch.minimum(y, y.clamp(min=1).log()), NUM_STEPS - 1)
    return _newton(y, z, 2).exp()


def _newton(y: Tensor, z: Tensor, num_steps: int) -> Tensor:
    """z ← z − (z + eᶻ − y)/(1 + eᶻ)."""
    for _ in range(num_steps):
        u = z.exp()
        z = z - (z + u - y) / (1 + u)
    return z


def _omega_upper(log_n: float, shift: float) -> float:
    """A float64 number ≥ ω(y), y = log n − shift: grown until u + log u ≥ y despite rounding."""
    if log_n == -math.inf:
        return 0.0
    y = max(math.nextafter(log_n - shift, math.inf), LOWEST_LOG_UPPER)
    if not y < LARGEST_LOG_UPPER:
        return math.inf
    z = min(y, math.log(max(y, 1.0)))
    for _ in range(NUM_STEPS):
        z -= (z + math.exp(z) - y) / (1 + math.exp(z))
    u = math.exp(z)
    # Until u + log u ≥ y for certain: four units of rounding cover log, sum and difference.
    while u + math.log(u) - y < 2**-51 * (u + abs(math.log(u)) + abs(y)):
        u = math.nextafter(u * (1 + 2**-51), math.inf)
    return u
