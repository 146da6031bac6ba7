"""Outward rounding of Python floats, for constants that must stay on the safe side when composed.

Every function returns a float64 number that is not below the exact result of the same operation on
the numbers given: IEEE arithmetic rounds to nearest, so one step towards +∞ after each operation is
enough. Underflow is covered by the same step and overflow gives inf. What is not a number becomes
inf: an upper bound that knows nothing.
"""

import math

# Unit roundoff of float64: fl(a ∘ b) = (a ∘ b)(1 + δ), |δ| ≤ 2⁻⁵³.
UNIT_ROUNDOFF = 2.0**-53


def round_up(value: float, operations: int = 1) -> float:
    """A number ≥ the exact result of ``operations`` roundings that produced ``value``.

    The exact result is at most value/(1 − 2⁻⁵³)ᵏ ≤ value (1 + k 2⁻⁵²) for k ≤ 2⁵².

    Args:
        value: ≥ 0, computed in float64 from non-negative numbers by sums, products, quotients and
            square roots, without underflow.
        operations: k, the length of the longest chain of roundings behind it.

    Returns:
        The value rounded up; inf for NaN.
    """
    return _next(value * (1 + operations * 2 * UNIT_ROUNDOFF))


def product_up(*factors: float) -> float:
    """A number ≥ Π factors, all factors ≥ 0.

    A factor that is exactly zero gives zero unless another is not finite.
    """
    result = 1.0
    for factor in factors:
        exact = factor == 1 or result == 1 or (0 in (factor, result) and _finite(factor, result))
        result = result * factor if exact else _next(result * factor)
    return _known(result)


def quotient_up(numerator: float, denominator: float) -> float:
    """A number ≥ numerator / denominator, numerator ≥ 0, denominator > 0 (zero gives inf)."""
    return _next(numerator / denominator) if denominator else math.inf


def sum_up(*terms: float) -> float:
    """A number ≥ Σ terms."""
    result = 0.0
    for term in terms:
        result = result + term if 0 in (term, result) else _next(result + term)
    return _known(result)


def sqrt_up(value: float) -> float:
    """A number ≥ √value, value ≥ 0 (square roots round to nearest like the other operations)."""
    return math.sqrt(value) if value in (0, 1) else _next(math.sqrt(value))


def _next(value: float) -> float:
    """The next larger float64; inf for NaN."""
    return _known(math.nextafter(value, math.inf))


def _known(value: float) -> float:
    """The value, or inf where it is NaN."""
    return math.inf if math.isnan(value) else value


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))
