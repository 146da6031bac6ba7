"""Outward rounding of Python floats, for constants that must stay on the safe side when composed.

Every function returns a float64 number that is not below the exact result of the same operation on
the numbers given. IEEE arithmetic rounds to nearest, so one step towards +∞ after each operation is
enough. Denormal numbers may be flushed to zero (training does so), hence nothing between zero and
the smallest normal number is returned. Overflow and NaN give inf.
"""

import math
import struct
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

# Unit roundoff of float64: fl(a ∘ b) = (a ∘ b)(1 + δ), |δ| ≤ 2⁻⁵³.
UNIT_ROUNDOFF = 2.0**-53
SMALLEST_NORMAL = 2.0**-1022


def round_up(value: float, operations: int = 1) -> float:
    """A number ≥ the exact result of ``operations`` roundings that produced ``value``.

    The exact result is at most value/(1 − 2⁻⁵³)ᵏ ≤ value (1 + k 2⁻⁵²) for a value ≥ 0 that was
    computed in float64 from non-negative numbers by sums, products, quotients and square roots,
    without underflow; k ≤ 2⁵² is the length of the longest chain of roundings behind it.
    """
    return _next(value * (1 + operations * 2 * UNIT_ROUNDOFF))


def product_up(*factors: float) -> float:
    """A number ≥ Π factors, all factors ≥ 0; 0 if one of them is, unless another is not finite."""
    result = 1.0
    for factor in map(_normal, factors):
        if 1 in (factor, result) or (0 in (factor, result) and math.isfinite(factor + result)):
            result = result * factor
        else:
            result = _next(result * factor)
    return _known(result)


def quotient_up(numerator: float, denominator: float) -> float:
    """A number ≥ numerator / denominator, numerator ≥ 0, denominator > 0 (zero gives inf)."""
    return _next(_normal(numerator) / denominator) if denominator else math.inf


def sum_up(*terms: float) -> float:
    """A number ≥ Σ terms, all terms ≥ 0."""
    result = 0.0
    for term in map(_normal, terms):
        result = result + term if 0 in (term, result) else _next(result + term)
    return _known(result)


def sqrt_up(value: float) -> float:
    """A number ≥ √value, value ≥ 0 (square roots round to nearest like the other operations)."""
    value = _normal(value)
    return value if value in (0, 1) else _next(math.sqrt(value))


def _normal(value: float) -> float:
    """The value, or the smallest normal number in place of a denormal one."""
    if struct.pack("d", abs(value)) == bytes(8):  # value == 0 may hold for denormal ones, too
        return 0.0
    return max(value, SMALLEST_NORMAL)


def _next(value: float) -> float:
    """The next larger normal float64; inf for NaN."""
    return _known(max(math.nextafter(value, math.inf), SMALLEST_NORMAL))


def _known(value: float) -> float:
    """The value, or inf where it is NaN."""
    return math.inf if math.isnan(value) else value


def upwards(bound: float, digits: int) -> str:
    """A proven bound rounded up to some digits after the point, but at least three significant."""
    if not math.isfinite(bound):
        return str(bound)
    exactly = Context(prec=400, rounding=ROUND_CEILING)
    last = min(-digits, Decimal(bound).adjusted() - 2)
    return f"{Decimal(bound).quantize(Decimal(10) ** last, context=exactly):f}"


def shortened_down(length: float) -> str:
    """A proven distance with three significant digits, rounded down."""
    return f"{float(Context(prec=3, rounding=ROUND_FLOOR).create_decimal(length)):g}"


def downwards(share: float, digits: int) -> float:
    """A share with some digits after the point, none of them rounded up: 1 means all."""
    return math.floor(share * 10**digits + 1e-9) / 10**digits  # 0.57 is a little less than 57/100
