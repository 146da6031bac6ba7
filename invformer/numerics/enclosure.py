"""Rigorous enclosures of real numbers: a float64 midpoint and a radius, entry by entry.

Every function returns an enclosure of the exact result for all exact arguments within the
enclosures given, in any order of summation. Overflow gives inf or NaN, which prove nothing.
docs/numerics.md §19 has the proofs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from invformer.numerics.rounding import UNIT_ROUNDOFF as U

# Relative error assumed of the library's exp and rsqrt: 2 ulp.
EXP = 4 * U
# Radii are float32; no formula for one rounds more than 2⁵ times before it is multiplied by this.
UP = 1 + 2.0**-18
# Added to every radius: it covers underflow and flushed denormal numbers.
UNDERFLOW = 2.0**-100
# Leading bits of a right factor; those of a left factor fill the 53 bits of an exact sum.
RIGHT_BITS = 25


@dataclass(frozen=True)
class Enclosure:
    """All x with |x − middle| ≤ radius; the middle in float64, the radius in float32."""

    middle: Tensor
    radius: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> "Enclosure":
        """The numbers in another shape, or some of them."""
        return Enclosure(view(self.middle), view(self.radius))

    def __getitem__(self, index: Any) -> "Enclosure":
        return self.map(lambda t: t[index])

    def __neg__(self) -> "Enclosure":
        return Enclosure(-self.middle, self.radius)

    def __add__(self, y: "Enclosure") -> "Enclosure":
        middle = self.middle + y.middle
        return Enclosure(middle, outward(self.radius + y.radius + U * size(middle)))

    def __sub__(self, y: "Enclosure") -> "Enclosure":
        return self + -y

    def __mul__(self, y: "Enclosure") -> "Enclosure":
        middle = self.middle * y.middle
        radius = self.radius * (size(y.middle) + y.radius) + size(self.middle) * y.radius
        return Enclosure(middle, outward(radius + U * size(middle)))

    def __truediv__(self, y: "Enclosure") -> "Enclosure":
        """For y > 0: |x/y − q| ≤ (r_x + |q| r_y) / (y − r_y) for the quotient q of midpoints."""
        middle = self.middle / y.middle
        radius = (self.radius + size(middle) * y.radius) / y.least()
        return Enclosure(middle, outward(radius + 2 * U * size(middle)))

    def least(self) -> Tensor:
        """A lower bound on numbers > 0."""
        return (self.middle.float() * (1 - 2.0**-22) - self.radius).clamp_(min=0)

    def exp(self) -> "Enclosure":
        """eˣ: e^{x ± r} is within eˣ (e^r − 1) of eˣ. The radius is infinite if r > 1."""
        middle = self.middle.exp()
        radius = size(middle) * (torch.expm1(self.radius) + 2 * EXP)
        return Enclosure(middle, outward(radius.masked_fill_(~(self.radius <= 1), math.inf)))

    def inverse_root(self) -> "Enclosure":
        """x^{−½} for x > 0, whose slope is at most ½ (x − r)^{−3/2}."""
        middle, least = self.middle.rsqrt(), self.least()
        radius = self.radius / (2 * least * least.sqrt())
        return Enclosure(middle, outward(radius + 2 * EXP * size(middle)))

    def sum(self) -> "Enclosure":
        """Σ x over the last axis."""
        count = self.middle.shape[-1]
        radius = self.radius + 2 * count * U * size(self.middle)
        return Enclosure(self.middle.sum(-1), sum_up(radius))

    def square_sum(self) -> "Enclosure":
        """Σ x² over the last axis: of leading bits f exactly, and of the rest r as Σ r (f + x)."""
        count = self.middle.shape[-1]
        bits = min(RIGHT_BITS, (53 - math.ceil(math.log2(count))) // 2)
        first, power = leading(self.middle, bits, -1)
        total = torch.linalg.vecdot(first, first)
        total += torch.linalg.vecdot(self.middle - first, self.middle + first)
        radius = sum_up(self.radius * (2 * UP * size(self.middle) + self.radius))
        rounding = size(power.squeeze(-1)).square_() * (8 * (count + 4) * count * U * 2.0**-bits)
        return Enclosure(total, outward(radius + rounding + U * size(total)))

    def matmul(self, y: "Matrix", *terms: "Enclosure") -> "Enclosure":
        """x y plus further terms.

        If y is split, the product of leading bits is exact in any order of summation. All else is
        smaller by 2⁻²⁰, so that its rounding in float64 is, too.
        """
        n = y.first.shape[-2]
        if y.rest is None:
            middle, rest = self.middle @ y.first, None
            radius = (self.radius + 2 * (n + 2) * U * size(self.middle)) @ y.sizes[..., :-1, :]
        else:
            bits = min(RIGHT_BITS, 53 - RIGHT_BITS - math.ceil(math.log2(n)))
            first, power = leading(self.middle, bits, -1)
            middle = first @ y.first
            rest = (self.middle - first) @ y.first
            rest += self.middle @ y.rest
            rounding = outward(power.float() * (4 * (n + 4) * n * U * 2.0**-bits))
            radius = torch.cat([self.radius, rounding], -1) @ y.sizes
        if y.radius is not None:
            radius += (size(self.middle) * UP) @ y.radius
        radius *= 1 + 2.0**-22 * (n + 8)
        for term in terms:
            middle = middle + term.middle
            radius += term.radius + U * size(middle)
        if rest is not None:
            middle += rest
        return Enclosure(middle, outward(radius.add_(size(middle), alpha=U)))

    def into_ball(self, radius: float) -> "Enclosure":
        """x/√(1 + ‖x‖²/R²) over the last axis."""
        one = torch.ones((), dtype=torch.float64, device=self.middle.device)
        r = constant(one * radius)
        shrinkage = (constant(one) + self.square_sum() / (r * r)).inverse_root()
        return self * shrinkage[..., None]

    def norm_at_least(self) -> tuple[Tensor, Tensor]:
        """A lower bound on ‖x‖₂ over the last axis, and the error it takes into account."""
        error = length_up(self.radius)
        return torch.linalg.vector_norm(self.middle, dim=-1) * (1 - 2.0**-30) - error, error

    def norm_at_most(self) -> Tensor:
        """An upper bound on ‖x‖₂ over the last axis."""
        return length_up(self.middle) + length_up(self.radius)

    def joined(self, y: "Enclosure") -> "Enclosure":
        """Both, one behind the other along the last axis."""
        pairs = (self.middle, y.middle), (self.radius, y.radius)
        return Enclosure(*(torch.cat(pair, -1) for pair in pairs))

    def with_one(self) -> "Enclosure":
        """[x, 1] along the last axis."""
        return self.joined(constant(torch.ones_like(self.middle[..., :1])))

    def paired(self) -> "Pair":
        """The numbers without low digits."""
        return Pair(self.middle, torch.zeros_like(self.middle), self.radius)


@dataclass(frozen=True)
class Pair:
    """All x with |x − (high + low)| ≤ radius: a midpoint of twice the digits."""

    high: Tensor
    low: Tensor
    radius: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> "Pair":
        """The numbers in another shape."""
        return Pair(view(self.high), view(self.low), view(self.radius))

    def __add__(self, y: "Pair") -> "Pair":
        """Rounding errs by at most 8 u² (|x| + |y|)."""
        total, error = two_sum(self.high, y.high)
        high, low = two_sum(total, error + (self.low + y.low))
        rounding = 8 * U**2 * (size(self.high) + size(y.high))
        return Pair(high, low, outward(self.radius + y.radius + rounding))

    def times(self, factor: Tensor) -> "Pair":
        """x times constants, where rounding errs by at most 8 u² |x factor|."""
        product, error = two_product(self.high, factor)
        high, low = two_sum(product, error + self.low * factor)
        return Pair(high, low, outward(self.radius * size(factor) + 16 * U**2 * size(product)))

    def affine(self, factor: "Pair", shift: "Pair") -> Enclosure:
        """x · factor + shift, rounded once the two large parts are added."""
        product = self.high * factor.high
        small = (self.low * factor.high + self.high * factor.low) + shift.low
        middle = (product + shift.high) + small
        radius = self.radius * (size(factor.high) + factor.radius) + size(self.high) * factor.radius
        rounding = 2 * U * (size(product) + size(middle)) + 16 * U**2 * size(shift.high)
        return Enclosure(middle, outward(radius + shift.radius + rounding))


class Matrix:
    """A right factor y, (…, n, columns), split for accurate products unless told otherwise.

    ``first`` has its leading bits, ``rest`` the others; all are first if it is not split. Radii are
    multiplied by ``sizes``: |y| + radius, and in one more row, if it is split, a power of two above
    each column. ``radius`` is None for constants.
    """

    def __init__(self, y: Enclosure, split: bool = True) -> None:
        self.first, power, self.rest = y.middle, y.middle[..., :1, :], None
        if split:
            self.first, power = leading(y.middle, RIGHT_BITS, -2)
            self.rest = y.middle - self.first
        self.sizes = outward(torch.cat([size(y.middle) + y.radius, size(power)], -2))
        self.radius = y.radius if y.radius.any() else None


def size(x: Tensor) -> Tensor:
    """|x| in float32."""
    return x.to(torch.float32, copy=True).abs_()


def outward(radius: Tensor) -> Tensor:
    """The radius rounded up, underflow included."""
    return (radius * UP).add_(UNDERFLOW)


def constant(x: Tensor) -> Enclosure:
    """Numbers without an error."""
    x = x.detach().double()
    return Enclosure(x, torch.zeros_like(x, dtype=torch.float32))


def sum_up(radius: Tensor) -> Tensor:
    """Σ over the last axis, rounded up."""
    return radius.sum(-1) * (UP + 2.0**-22 * radius.shape[-1]) + UNDERFLOW


def leading(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """x to ``bits`` bits below its largest entry along ``dim``, and a power of two above that.

    Such numbers are multiples of one grid, so that sums of their products are exact in any order.
    """
    least, most = torch.aminmax(x, dim=dim, keepdim=True)
    _, exponent = torch.frexp(torch.maximum(-least, most))
    power = torch.exp2(exponent.double())
    shifter = power * (1.5 * 2.0 ** (52 - bits))
    return (x + shifter).sub_(shifter), power


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


def length_up(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, rounded up."""
    return torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-30) + UNDERFLOW
