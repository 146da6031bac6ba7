"""Rigorous enclosures of real numbers: a float64 midpoint and a radius, entry by entry.

Every function returns an enclosure of the exact result for all exact arguments within the
enclosures given, in any order of summation. Overflow gives inf or NaN, which prove nothing.
docs/numerics.md §19 has the proofs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from invformer.numerics.precision import changed

# Unit roundoff of float64, which midpoints are computed in.
U = 2.0**-53
# Relative errors assumed of the library's exp and rsqrt (2 ulp) and of its activations (8 ulp).
EXP, ACTIVATION = 4 * U, 16 * U
# Radii are float32; no formula for one rounds more than 2⁵ times before it is multiplied by this.
UP = 1 + 2.0**-18
# Added to every radius: it covers underflow and flushed denormal numbers.
UNDERFLOW = 2.0**-100
# Leading bits of a right factor; those of a left factor fill the 53 bits of an exact sum.
RIGHT_BITS = 25


class Enclosure(NamedTuple):
    """All x with |x − middle| ≤ radius; the middle in float64, the radius in float32."""

    middle: Tensor
    radius: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> "Enclosure":
        """The numbers in another shape, or some of them."""
        return Enclosure(view(self.middle), view(self.radius))


class Pair(NamedTuple):
    """All x with |x − (high + low)| ≤ radius: a midpoint of twice the digits."""

    high: Tensor
    low: Tensor
    radius: Tensor


class Matrix(NamedTuple):
    """A right factor y: its leading bits, the rest, and the factors of radii.

    Without a rest it is not split: products are then float64's own, and radii larger.
    ``sizes`` is |y| + radius, and in one more row a power of two above each column. ``radius`` is
    None for constants.
    """

    first: Tensor
    rest: Tensor | None
    sizes: Tensor
    radius: Tensor | None


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


def joined(x: Enclosure, y: Enclosure) -> Enclosure:
    """Both, one behind the other along the last axis."""
    return Enclosure(*(torch.cat(parts, -1) for parts in zip(x, y, strict=True)))


def with_one(x: Enclosure) -> Enclosure:
    """[x, 1] along the last axis."""
    return joined(x, constant(torch.ones_like(x.middle[..., :1])))


def add(x: Enclosure, y: Enclosure) -> Enclosure:
    """x + y."""
    middle = x.middle + y.middle
    return Enclosure(middle, outward(x.radius + y.radius + U * size(middle)))


def negated(x: Enclosure) -> Enclosure:
    """−x."""
    return Enclosure(-x.middle, x.radius)


def multiply(x: Enclosure, y: Enclosure) -> Enclosure:
    """x y, entry by entry."""
    middle = x.middle * y.middle
    radius = x.radius * (size(y.middle) + y.radius) + size(x.middle) * y.radius
    return Enclosure(middle, outward(radius + U * size(middle)))


def divide(x: Enclosure, y: Enclosure) -> Enclosure:
    """x / y for y > 0: |x/y − q| ≤ (r_x + |q| r_y) / (y − r_y) for the quotient q of midpoints."""
    middle = x.middle / y.middle
    least = (y.middle.float() * (1 - 2.0**-22) - y.radius).clamp_(min=0)
    radius = (x.radius + size(middle) * y.radius) / least
    return Enclosure(middle, outward(radius + 2 * U * size(middle)))


def exp(x: Enclosure) -> Enclosure:
    """eˣ: e^{x ± r} is within eˣ (e^r − 1) of eˣ. The radius is infinite if r > 1."""
    middle = x.middle.exp()
    radius = size(middle) * (torch.expm1(x.radius) + 2 * EXP)
    return Enclosure(middle, outward(radius.masked_fill_(~(x.radius <= 1), math.inf)))


def inverse_root(x: Enclosure) -> Enclosure:
    """x^{−½} for x > 0, whose slope is at most ½ (x − r)^{−3/2}."""
    middle = x.middle.rsqrt()
    least = (x.middle.float() * (1 - 2.0**-22) - x.radius).clamp_(min=0)
    radius = x.radius / (2 * least * least.sqrt())
    return Enclosure(middle, outward(radius + 2 * EXP * size(middle)))


def sum_last(x: Enclosure) -> Enclosure:
    """Σ x over the last axis."""
    count = x.middle.shape[-1]
    radius = x.radius + 2 * count * U * size(x.middle)
    return Enclosure(x.middle.sum(-1), sum_up(radius))


def square_sum(x: Enclosure) -> Enclosure:
    """Σ x² over the last axis: of leading bits f exactly, and of the rest r as Σ r (f + x)."""
    count = x.middle.shape[-1]
    bits = min(RIGHT_BITS, (53 - math.ceil(math.log2(count))) // 2)
    first, power = leading(x.middle, bits, -1)
    total = torch.linalg.vecdot(first, first)
    total += torch.linalg.vecdot(x.middle - first, x.middle + first)
    radius = sum_up(x.radius * (2 * UP * size(x.middle) + x.radius))
    rounding = size(power.squeeze(-1)).square_() * (8 * (count + 4) * count * U * 2.0**-bits)
    return Enclosure(total, outward(radius + rounding + U * size(total)))


def sum_up(radius: Tensor) -> Tensor:
    """Σ over the last axis, rounded up."""
    return radius.sum(-1) * (UP + 2.0**-22 * radius.shape[-1]) + UNDERFLOW


def into_ball(x: Enclosure, radius: float) -> Enclosure:
    """x/√(1 + ‖x‖²/R²) over the last axis."""
    one = torch.ones((), dtype=torch.float64, device=x.middle.device)
    lengths = divide(square_sum(x), multiply(constant(one * radius), constant(one * radius)))
    shrinkage = inverse_root(add(constant(one), lengths))
    return multiply(x, shrinkage.map(lambda t: t.unsqueeze(-1)))


def leading(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """x to ``bits`` bits below its largest entry along ``dim``, and a power of two above that.

    Such numbers are multiples of one grid, so that sums of their products are exact in any order.
    """
    least, most = torch.aminmax(x, dim=dim, keepdim=True)
    _, exponent = torch.frexp(torch.maximum(-least, most))
    power = torch.exp2(exponent.double())
    shifter = power * (1.5 * 2.0 ** (52 - bits))
    return (x + shifter).sub_(shifter), power


def matrix(y: Enclosure, split: bool = True) -> Matrix:
    """A right factor (…, n, columns), split for accurate products unless told otherwise."""
    first, power = leading(y.middle, RIGHT_BITS, -2) if split else (y.middle, y.middle[..., :1, :])
    sizes = outward(torch.cat([size(y.middle) + y.radius, size(power)], -2))
    rest = y.middle - first if split else None
    return Matrix(first, rest, sizes, y.radius if y.radius.any() else None)


def matmul(x: Enclosure, y: Matrix, *terms: Enclosure) -> Enclosure:
    """x y plus further terms.

    If y is split, the product of leading bits is exact in any order of summation. All else is
    smaller by 2⁻²⁰, so that its rounding in float64 is, too.
    """
    n = y.first.shape[-2]
    if y.rest is None:
        middle, rest = x.middle @ y.first, None
        radius = (x.radius + 2 * (n + 2) * U * size(x.middle)) @ y.sizes[..., :-1, :]
    else:
        bits = min(RIGHT_BITS, 53 - RIGHT_BITS - math.ceil(math.log2(n)))
        first, power = leading(x.middle, bits, -1)
        middle = first @ y.first
        rest = (x.middle - first) @ y.first
        rest += x.middle @ y.rest
        rounding = outward(power.float() * (4 * (n + 4) * n * U * 2.0**-bits))
        radius = torch.cat([x.radius, rounding], -1) @ y.sizes
    if y.radius is not None:
        radius += (size(x.middle) * UP) @ y.radius
    radius *= 1 + 2.0**-22 * (n + 8)
    for term in terms:
        middle = middle + term.middle
        radius += term.radius + U * size(middle)
    if rest is not None:
        middle += rest
    return Enclosure(middle, outward(radius.add_(size(middle), alpha=U)))


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


def paired(x: Enclosure) -> Pair:
    """The numbers as a pair without low digits, for :func:`accumulate`."""
    return Pair(x.middle, torch.zeros_like(x.middle), x.radius)


def accumulate(x: Pair, y: Pair) -> Pair:
    """x + y, where rounding errs by at most 8 u² (|x| + |y|)."""
    total, error = two_sum(x.high, y.high)
    high, low = two_sum(total, error + (x.low + y.low))
    rounding = 8 * U**2 * (size(x.high) + size(y.high))
    return Pair(high, low, outward(x.radius + y.radius + rounding))


def scale(x: Pair, factor: Tensor) -> Pair:
    """x times constants, where rounding errs by at most 8 u² |x factor|."""
    product, error = two_product(x.high, factor)
    high, low = two_sum(product, error + x.low * factor)
    return Pair(high, low, outward(x.radius * size(factor) + 16 * U**2 * size(product)))


def affine(x: Pair, factor: Pair, shift: Pair) -> Enclosure:
    """x · factor + shift, rounded once the two large parts are added."""
    product = x.high * factor.high
    small = (x.low * factor.high + x.high * factor.low) + shift.low
    middle = (product + shift.high) + small
    radius = x.radius * (size(factor.high) + factor.radius) + size(x.high) * factor.radius
    rounding = 2 * U * (size(product) + size(middle)) + 16 * U**2 * size(shift.high)
    return Enclosure(middle, outward(radius + shift.radius + rounding))


def norm_at_least(x: Enclosure) -> tuple[Tensor, Tensor]:
    """A lower bound on ‖x‖₂ over the last axis, and the error it takes into account."""
    error = length_up(x.radius)
    return torch.linalg.vector_norm(x.middle, dim=-1) * (1 - 2.0**-30) - error, error


def norm_at_most(x: Enclosure) -> Tensor:
    """An upper bound on ‖x‖₂ over the last axis."""
    return length_up(x.middle) + length_up(x.radius)


def length_up(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, rounded up."""
    return torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-30) + UNDERFLOW


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Products in the formats of their factors: no autocast, no TF32 or bfloat16 for float32."""
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    with changed(*precision, "highest"), torch.autocast(device.type, enabled=False):
        yield
