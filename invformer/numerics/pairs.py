"""Enclosures whose midpoints are sums of two float64: errors of 2⁻⁸⁰ instead of 2⁻⁵³.

Sums and products without an error are Knuth's and Dekker's; docs/numerics.md §19 bounds what the
rest rounds. Every bound here is at least twice that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from functools import cache, reduce
from math import inf
from operator import add
from typing import Any

import torch
from torch import Tensor

from invformer.numerics.enclosure import (
    Enclosure,
    Matrix,
    U,
    bits_of_slices,
    leading,
    outward,
    size,
)

# Relative error of a quotient, an inverse root and an exponential.
QUOTIENT, ROOT, EXP = 64 * U**2, 2048 * U**2, 2.0**-83
# Exponentials are those of multiples of ln(2)/PARTS, from a table, times that of a rest.
PARTS = 1024
# Below this eˣ is less than what every radius is enlarged by; above −LEAST it is out of range.
LEAST = -700.0


@dataclass(frozen=True)
class Pair(Enclosure):
    """All x with |x − (middle + low)| ≤ radius, |low| ≤ u |middle|."""

    low: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> "Pair":
        """As :meth:`.Enclosure.map`."""
        return Pair(view(self.middle), view(self.radius), view(self.low))

    def exact(self) -> "Pair":
        """As :meth:`.Enclosure.exact`."""
        return replace(self, radius=torch.zeros_like(self.radius))

    def single(self) -> Enclosure:
        """The midpoint rounded to float64."""
        return Enclosure(self.middle, outward(self.radius + U * size(self.middle)))

    def __neg__(self) -> "Pair":
        return Pair(-self.middle, self.radius, -self.low)

    def __add__(self, y: Enclosure) -> "Pair":
        """Rounding errs by at most 3 u² (|x| + |y|)."""
        y = paired(y)
        total, error = two_sum(self.middle, y.middle)
        rounding = 8 * U**2 * (size(self.middle) + size(y.middle))
        return pair(total, error + (self.low + y.low), self.radius + y.radius + rounding)

    def __mul__(self, y: Enclosure) -> "Pair":
        """Rounding errs by at most 8 u² |x y|."""
        y = paired(y)
        product, error = two_product(self.middle, y.middle)
        error += self.middle * y.low + self.low * y.middle
        return pair(product, error, self.product_moved(y) + 16 * U**2 * size(product))

    def __truediv__(self, y: Enclosure) -> "Pair":
        """For y > 0; the quotient of midpoints by one Newton step."""
        y = paired(y)
        first = self.middle / y.middle
        product, error = two_product(first, y.middle)
        rest = ((self.middle - product) - error + self.low) - first * y.low
        radius = self.quotient_moved(y, first) + QUOTIENT * size(first)
        return pair(first, rest / y.middle, radius)

    def inverse_root(self) -> "Pair":
        """As :meth:`.Enclosure.inverse_root`, by one Newton step: y + y (1 − x y²)/2."""
        first = self.middle.rsqrt()
        square, error = two_product(first, first)
        product, rest = two_product(self.middle, square)
        off = (1 - product) - rest - (self.middle * error + self.low * square)
        return pair(first, first * off / 2, self.root_moved() + ROOT * size(first))

    def exp(self) -> "Pair":
        """As :meth:`.Enclosure.exp`: x = k ln(2)/1024 + a + b, and eˣ = 2^{k/1024} e^{a + b}.

        k ln(2)/1024 is subtracted in three parts, two of them without an error. |a| < 2⁻¹¹, so that
        from a³/6 on the terms of the series are small enough for float64.
        """
        x = self.middle.clamp(min=LEAST)
        k = (x.clamp(max=-LEAST) * PARTS / 0.6931471805599453).round()
        (first, second, third), high, low = powers_of_two(x.device)
        a, b = two_sum(x - k * first, -k * second)
        a, b = two_sum(a, b + (self.low.where(self.middle >= LEAST, 0) - k * third))
        square, error = two_product(a, a)
        cube = a * square * (1 / 6 + a * (1 / 24 + a * (1 / 120 + a / 720)))
        more, rest = two_sum(a, square / 2)  # e^{a + b} − 1 = more + rest
        more, other = two_sum(more, cube)
        rest += other + (b + (error / 2 + a * b))
        k = k.nan_to_num().long()
        high, low = high[k % PARTS], low[k % PARTS]
        product, error = two_product(high, more)
        total, other = two_sum(high, product)
        rest = other + (error + low * more + high * rest + low)
        exponent = k.div(PARTS, rounding_mode="floor") + 1023
        power = (exponent << 52).view(torch.float64)  # exact on any device, as exp2 need not be
        result = pair(total * power, rest * power, self.radius)
        radius = size(result.middle) * (torch.expm1(self.radius) + EXP)
        known = (self.radius <= 1) & (x <= -LEAST)
        return replace(result, radius=outward(radius).masked_fill(~known, inf))

    def sum(self) -> "Pair":
        """Σ x over the last axis, one number after the other."""
        return paired(reduce(add, (self[..., i] for i in range(self.middle.shape[-1]))))

    def square_sum(self) -> "Pair":
        """Σ x² over the last axis."""
        return (self * self).sum()

    def matmul(self, y: Matrix, *terms: Enclosure) -> "Pair":
        """x y plus further terms, of x = x₀ + x₁ + x₂ and y = y₀ + y₁ + y₂.

        x₀ y₀, x₀ y₁ and x₁ y₀ are exact in any order of summation. The rest is rounded; it is below
        4 n 2^{−2 bits} X Y, for powers of two X and Y above the rows of x and the columns of y.
        """
        n = y.middle.shape[-2]
        bits = bits_of_slices(n)
        if y.slices is None:
            first, second, third, power = slices(y.value, bits, -2)
            y.slices = first, second, second + third, third, power
        x0, x1, x2, row = slices(self, bits, -1)
        y0, y1, y12, y2, column = y.slices
        total, error = two_sum(x0 @ y0, x0 @ y1)
        total, other = two_sum(total, x1 @ y0)
        rest = (error + other) + (x0 @ y2 + x1 @ y12 + x2 @ y.middle)
        rounding = size(16 * (n + 4) * n * U * 2.0 ** (-2 * bits) * row * column)
        radius = y.product_moved(self.middle, self.radius) + rounding
        return reduce(add, terms, pair(total, rest, radius))

    def joined(self, y: Enclosure) -> "Pair":
        """As :meth:`.Enclosure.joined`."""
        y = paired(y)
        parts = (self.middle, y.middle), (self.radius, y.radius), (self.low, y.low)
        return Pair(*(torch.cat(part, -1) for part in parts))


def paired(x: Enclosure) -> Pair:
    """The same numbers, with low digits of zero if they have none."""
    return x if isinstance(x, Pair) else Pair(x.middle, x.radius, torch.zeros_like(x.middle))


def pair(high: Tensor, low: Tensor, radius: Tensor) -> Pair:
    """high + low, whose sum is rounded into the middle; the radius rounded up."""
    middle, low = two_sum(high, low)
    return Pair(middle, outward(radius), low)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b = sum + error, exactly (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a b = product + error, exactly (Dekker, with Veltkamp's splitting)."""
    a_high, b_high = (c - (c - x) for x in (a, b) for c in [x * (2.0**27 + 1)])
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def slices(x: Enclosure, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = first + second + rest, the first two of so many bits below their largest along ``dim``.

    And a power of two above every entry of x. The rest is rounded by 2⁻⁵³ of itself.
    """
    first, power = leading(x.middle, bits, dim)
    rest = x.middle - first
    second, _ = leading(rest, bits, dim)
    rest = rest - second
    return first, second, rest + x.low if isinstance(x, Pair) else rest, power


@cache
def powers_of_two(device: torch.device) -> tuple[tuple[float, float, float], Tensor, Tensor]:
    """ln(2)/PARTS in three parts, two of 32 bits, and 2^{j/PARTS} as sums of two float64."""
    with localcontext(prec=60):
        step, parts = Decimal(2).ln() / PARTS, []
        for scale in (2.0**42, 2.0**74):
            parts.append(round(step * Decimal(scale)) / scale)
            step -= Decimal(parts[-1])
        powers = [Decimal(2) ** (Decimal(j) / PARTS) for j in range(PARTS)]
        high = [float(p) for p in powers]
        low = [float(p - Decimal(h)) for p, h in zip(powers, high, strict=True)]
    tables: Any = (torch.tensor(t, dtype=torch.float64, device=device) for t in (high, low))
    return (parts[0], parts[1], float(step)), *tables
