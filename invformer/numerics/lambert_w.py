"""The Lambert W function and two gains made of it: differentiable in torch, rounded up in Python.

Everything reduces to the Wright omega function ω(y) = W₀(eʸ), the u > 0 with u + log u = y:

    W₀(x) = ω(log x),    φ(u) = u e^{u+1},
    g(n) = φ⁻¹(n) = W₀(n/e) = ω(log n − 1),    κ(n) = 1 + 2 W₀(n e^{−3/2}) = 1 + 2 ω(log n − 3/2)

The torch functions work under autograd (to third order), torch.func, vmap and torch.compile, in
float32 and float64, without a host sync. The ``_upper`` functions serve certificates: Python
floats, never below the true value.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.rounding import SMALLEST_NORMAL, is_exactly_zero

# Newton's method below starts right of the root of a convex function, so it descends monotonically;
# 1 + 4 steps reach float64 rounding for every y.
NUM_STEPS = 5
# exp(-750) is zero in float64: below it ω is zero to the last bit and so is its derivative.
LOWEST_LOG = -750.0
# Rounded up, e^{−700} stands for everything below it (and stays a normal number).
LOWEST_LOG_UPPER = -700.0
# Beyond it the margins overflow; log n of a float64 mass is at most 710.
LARGEST_LOG_UPPER = 1e300


def lambert_w0(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """W₀(x), the w ≥ 0 with w eʷ = x.

    Relative accuracy is that of the dtype, also as x → 0; W₀′(x) = e^{−w}/(1 + w) is finite there.

    Args:
        x: finite and ≥ 0, float32 or float64. A negative entry gives NaN (a check would be a sync).

    Returns:
        W₀ of every entry.

    Source: Corless et al. 1996, *On the Lambert W function*.
    """
    with torch.no_grad():
        w = _omega(x.log())
    # Newton on w − x e^{−w} = 0 from the solution: cleans the rounding of log, and carries the
    # derivatives (k steps from a constant start are right to order 2ᵏ − 1).
    for _ in range(2):
        w = w - (w - x * (-w).exp()) / (1 + w)
    return w


def phi_inverse(n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """g(n) = φ⁻¹(n) = W₀(n/e), the u ≥ 0 with u e^{u+1} = n; g(0) = 0, g′(0) = 1/e.

    The largest mean logit gap Σ_j P_ij s_j of a softmax row whose own logit is 0 and whose other
    tokens have mass n (Kim et al. 2021, arXiv 2006.04710, Theorem 3.2, with n = N − 1).

    Args:
        n: finite and ≥ 0, float32 or float64.

    Returns:
        g of every entry; grows like log n.
    """
    return lambert_w0(n / math.e)


def phi_inverse_from_log(log_n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """g(n) from log n: the u with u + log u + 1 = log n, for masses that come as logsumexp.

    Args:
        log_n: log n from −∞ (no other token: g = 0, derivative 0) to any finite size.

    Returns:
        g of every entry; dg/d(log n) = g/(1 + g) ∈ [0, 1).
    """
    return _differentiable_omega(log_n - 1)


def causal_gain(n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """κ(n) = 1 + 2 W₀(n e^{−3/2}), the largest gain of a head's diagonal Jacobian block.

    Args:
        n: finite and ≥ 0, float32 or float64: the mass of the other visible tokens.

    Returns:
        κ of every entry. Not a Lipschitz constant of the layer: earlier tokens are held fixed.

    Source: ours, docs/numerics.md.
    """
    return 1 + 2 * lambert_w0(n * math.exp(-1.5))


def causal_gain_from_log(log_n: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """κ(n) = 1 + 2 ω(log n − 3/2) from log n, see :func:`causal_gain`.

    Args:
        log_n: log n from −∞ (κ = 1) to any finite size.

    Returns:
        κ of every entry.
    """
    return 1 + 2 * _differentiable_omega(log_n - 1.5)


def phi_inverse_upper(n: float) -> float:
    """A float64 number ≥ g(n), above it by less than 1e-13 of its size: for certificates.

    Args:
        n: ≥ 0; inf and NaN give inf.

    Returns:
        An upper bound on g(n), proven by evaluating u + log u with its rounding.

    Raises:
        ValueError: n is negative.
    """
    return phi_inverse_upper_from_log(_log_upper(n))


def phi_inverse_upper_from_log(log_n: float) -> float:
    """A float64 number ≥ g(n), from any number ≥ log n.

    Args:
        log_n: −∞ gives 0; +∞ and NaN give inf.

    Returns:
        An upper bound on g(n).
    """
    return _omega_upper(log_n, shift=1.0)


def causal_gain_upper(n: float) -> float:
    """A float64 number ≥ κ(n) = 1 + 2 W₀(n e^{−3/2}), above it by less than 1e-13 of its size.

    Args:
        n: ≥ 0; inf and NaN give inf.

    Returns:
        An upper bound on κ(n).

    Raises:
        ValueError: n is negative.
    """
    return causal_gain_upper_from_log(_log_upper(n))


def causal_gain_upper_from_log(log_n: float) -> float:
    """A float64 number ≥ κ(n), from any number ≥ log n.

    Args:
        log_n: −∞ gives 1; +∞ and NaN give inf.

    Returns:
        An upper bound on κ(n).
    """
    if log_n == -math.inf:
        return 1.0
    return math.nextafter(1 + 2 * _omega_upper(log_n, shift=1.5), math.inf)


def _omega(y: Tensor) -> Tensor:
    """ω(y) = eᶻ with z + eᶻ = y, by Newton on z."""
    return _newton(y.clamp(min=LOWEST_LOG), start=None, num_steps=NUM_STEPS).exp()


def _differentiable_omega(y: Tensor) -> Tensor:
    """ω(y), with derivatives to third order from two Newton steps at the solution."""
    y = y.clamp(min=LOWEST_LOG)
    with torch.no_grad():
        z = _newton(y, start=None, num_steps=NUM_STEPS)
    return _newton(y, start=z, num_steps=2).exp()


def _newton(y: Tensor, start: Tensor | None, num_steps: int) -> Tensor:
    """z ← z − (z + eᶻ − y)/(1 + eᶻ), from log max(y, 1) for y > 0 and from y below."""
    z = torch.minimum(y, y.clamp(min=1).log()) if start is None else start
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
    while not _reaches(u, y):
        u = math.nextafter(u * (1 + 2**-51), math.inf)
    return u


def _reaches(u: float, y: float) -> bool:
    """Whether u + log u ≥ y for certain: four units of rounding cover log, sum and difference."""
    log_u = math.log(u)
    return u + log_u - y >= 2**-51 * (u + abs(log_u) + abs(y))


def _log_upper(n: float) -> float:
    """A float64 number ≥ log n."""
    if n < 0:
        raise ValueError(f"a mass of visible tokens is never negative, got {n}")
    if is_exactly_zero(n):
        return -math.inf
    return math.nextafter(math.log(max(n, SMALLEST_NORMAL)), math.inf) if n < math.inf else math.inf
