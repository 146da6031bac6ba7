"""Rigorous enclosures of real numbers: a float64 midpoint and a radius, entry by entry.

Every function returns an enclosure of the exact result for all exact arguments within the
enclosures given, in any order of summation. Overflow gives inf or NaN, in the midpoint or in the
radius, which proves nothing. docs/numerics.md §19 has the proofs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
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
        y = y.single()
        middle = self.middle + y.middle
        return Enclosure(middle, outward(self.radius + y.radius + U * size(middle)))

    def __sub__(self, y: "Enclosure") -> "Enclosure":
        return self + -y

    def __mul__(self, y: "Enclosure") -> "Enclosure":
        y = y.single()
        middle = self.middle * y.middle
        return Enclosure(middle, outward(self.product_moved(y) + U * size(middle)))

    def __truediv__(self, y: "Enclosure") -> "Enclosure":
        """For y > 0."""
        y = y.single()
        middle = self.middle / y.middle
        return Enclosure(middle, outward(self.quotient_moved(y, middle) + 2 * U * size(middle)))

    def product_moved(self, y: "Enclosure") -> Tensor:
        """How far x y may be from the product of the midpoints."""
        return self.radius * (size(y.middle) + y.radius) + size(self.middle) * y.radius

    def quotient_moved(self, y: "Enclosure", q: Tensor) -> Tensor:
        """How far x/y may be from the quotient q of the midpoints: (r_x + |q| r_y)/(y − r_y)."""
        least = y.least()
        return self.radius / least + size(q) * (y.radius / least)

    def least(self) -> Tensor:
        """A lower bound on numbers > 0."""
        largest = torch.finfo(torch.float32).max
        middle = self.middle.float().clamp_(max=largest)
        return (middle * (1 - 2.0**-22) - self.radius).clamp_(min=0)

    def root_moved(self) -> Tensor:
        """How far x^{−½} may be from that of the midpoint: r/2 (x − r)^{−3/2}."""
        least = self.least().double()
        return (self.radius / (2 * least * least.sqrt())).float()

    def exp(self) -> "Enclosure":
        """eˣ: e^{x ± r} is within eˣ (e^r − 1) of eˣ. The radius is infinite if r > 1."""
        middle = self.middle.exp()
        radius = size(middle) * (torch.expm1(self.radius) + 2 * EXP)
        return Enclosure(middle, outward(radius.masked_fill_(~(self.radius <= 1), math.inf)))

    def inverse_root(self) -> "Enclosure":
        """x^{−½} for x > 0."""
        middle = self.middle.rsqrt()
        return Enclosure(middle, outward(self.root_moved() + 2 * EXP * size(middle)))

    def sum(self) -> "Enclosure":
        """Σ x over the last axis."""
        count = self.middle.shape[-1]
        radius = self.radius + 2 * count * U * size(self.middle)
        return Enclosure(self.middle.sum(-1), sum_up(radius))

    def square_sum(self) -> "Enclosure":
        """Σ x² over the last axis: of leading bits f exactly, and of the rest r as Σ r (f + x)."""
        count = self.middle.shape[-1]
        bits = bits_of_slices(count)
        first, power = leading(self.middle, bits, -1)
        total = torch.linalg.vecdot(first, first)
        total += torch.linalg.vecdot(self.middle - first, self.middle + first)
        radius = sum_up(self.radius * (2 * UP * size(self.middle) + self.radius))
        rounding = size(power.squeeze(-1)).square_() * (8 * (count + 4) * count * U * 2.0**-bits)
        return Enclosure(total, outward(radius + rounding + U * size(total)))

    def matmul(self, y: "Matrix", *terms: "Enclosure") -> "Enclosure":
        """x y plus further terms, for y in float64, in any order of summation."""
        rounding = 2 * (y.middle.shape[-2] + 2) * U * size(self.middle)
        radius = y.product_moved(self.middle, self.radius + rounding)
        return reduce(add, terms, Enclosure(self.middle @ y.middle, outward(radius)))

    def into_ball(self, radius: float) -> "Enclosure":
        """x/√(1 + ‖x‖²/R²) over the last axis."""
        one, r = (constant(self.middle.new_tensor(number)) for number in (1.0, radius))
        shrinkage = (self.square_sum() / r / r + one).inverse_root()
        return self * shrinkage[..., None]

    def at_least(self) -> Tensor:
        """A lower bound on |x|."""
        return self.middle.abs() * (1 - 2.0**-30) - self.radius

    def norm_at_least(self) -> tuple[Tensor, Tensor]:
        """A lower bound on ‖x‖₂ over the last axis, and the error it takes into account."""
        error = length_up(self.radius)
        return torch.linalg.vector_norm(self.middle, dim=-1) * (1 - 2.0**-30) - error, error

    def norm_at_most(self) -> Tensor:
        """An upper bound on ‖x‖₂ over the last axis."""
        return length_up(self.middle) + length_up(self.radius)

    def joined(self, y: "Enclosure") -> "Enclosure":
        """Both, one behind the other along the last axis."""
        y = y.single()
        pairs = (self.middle, y.middle), (self.radius, y.radius)
        return Enclosure(*(torch.cat(pair, -1) for pair in pairs))

    def with_one(self) -> "Enclosure":
        """[x, 1] along the last axis."""
        return self.joined(constant(torch.ones_like(self.middle[..., :1])))

    def exact(self) -> "Enclosure":
        """The midpoints, as if they were exact."""
        return constant(self.middle)

    def single(self) -> "Enclosure":
        """Itself: its midpoints are in float64."""
        return self


class Matrix:
    """A right factor y, (…, n, columns), and what products with it need.

    Radii of a left factor are multiplied by ``sizes``: |y| + radius. ``radius`` is None for
    constants.
    """

    def __init__(self, y: Enclosure) -> None:
        self.value, self.middle = y, y.middle
        self.sizes = outward(size(y.middle) + y.radius)
        self.radius = y.radius if y.radius.any() else None
        self.slices: Any = None  # of :mod:`.pairs`, when they are needed

    def product_moved(self, middle: Tensor, radius: Tensor) -> Tensor:
        """How far x y may be from the product of the midpoints, for x of this midpoint and radius.

        The radius may include what rounding adds to x. Rounding of the sums here is included.
        """
        moved = radius @ self.sizes
        if self.radius is not None:
            moved += (size(middle) * UP) @ self.radius
        return moved * (1 + 2.0**-22 * (self.middle.shape[-2] + 8))


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


def bits_of_slices(n: int) -> int:
    """Such that a sum of n products of numbers of so many bits has at most 53."""
    return (53 - math.ceil(math.log2(n))) // 2


def length_up(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, rounded up."""
    return torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-30) + UNDERFLOW
