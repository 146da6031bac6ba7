"""Enclosures contain what Arb says, for exact arguments and for any within the radii."""

import math
import operator

import pytest
import torch
from flint import arb, arb_mat, ctx

from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, Matrix, constant
from invformer.numerics.pairs import Pair, paired

ctx.prec = 200


def random(*shape: int, spread: float = 6.0, seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(spread * torch.randn(shape, generator=generator))
    return size * torch.randn(shape, generator=generator)


def of_kind(kind: type[Enclosure], x: torch.Tensor, radius: torch.Tensor) -> Enclosure:
    """An enclosure; one of pairs has low digits."""
    if kind is Enclosure:
        return Enclosure(x, radius)
    low = x * enclosure.U * (torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) - 0.5)
    return Pair(x, radius, low)


def exactly(x: Enclosure) -> list[arb]:
    """The midpoints of a vector, in 200 bits."""
    low = x.low.tolist() if isinstance(x, Pair) else [0.0] * len(x.middle)
    return [arb(a) + arb(b) for a, b in zip(x.middle.tolist(), low, strict=True)]


def within(exact: arb, found: Enclosure) -> bool:
    """Whether one exact number lies in one enclosure."""
    (middle,) = exactly(found[None])
    return bool(abs(exact - middle) <= arb(found.radius.item()))


KINDS = pytest.mark.parametrize("kind", [Enclosure, Pair])


@pytest.mark.parametrize("inner", [1, 3, 24, 384])
@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@KINDS
def test_a_product_is_enclosed_and_that_of_pairs_has_more_digits(
    inner: int, spread: float, dtype: torch.dtype, kind: type[Enclosure]
) -> None:
    x, y = random(5, inner, spread=spread), random(inner, 4, spread=spread, seed=1).to(dtype)
    x[1] = 0.0
    left = of_kind(kind, x, torch.zeros(x.shape, dtype=torch.float32))
    found = left.matmul(Matrix(constant(y)))
    exact = arb_mat([exactly(row) for row in map(left.__getitem__, range(5))])
    exact = exact * arb_mat(y.double().tolist())
    for i in range(5):
        for j in range(4):
            assert within(exact[i, j], found[i, j])
    plain = inner * enclosure.U * x.abs() @ y.double().abs()
    if kind is Pair and inner == 384 and spread == 0:
        assert (found.radius < 1e-7 * plain)[x.any(-1)].all()


@KINDS
@pytest.mark.parametrize("relative", [1e-12, 1e-3, 2.0])
def test_a_product_of_enclosures_is_enclosed(relative: float, kind: type[Enclosure]) -> None:
    x, y = random(4, 24, spread=1.0), random(24, 4, spread=1.0, seed=1)
    by, of = (relative * x.abs()).float(), (relative * random(24, 4, seed=2).abs()).float()
    third = Enclosure(random(4, 4, seed=3), (relative * random(4, 4, seed=4).abs()).float())
    left = Enclosure(x, by) if kind is Enclosure else paired(Enclosure(x, by))
    found = left.matmul(Matrix(Enclosure(y, of)), third)
    for i in range(4):
        for j in range(4):
            total = arb(third.middle[i, j].item()) + arb(third.radius[i, j].item())
            for k in range(24):  # the corner in which every error is positive
                a, b, r, s = (t.item() for t in (x[i, k], y[k, j], by[i, k], of[k, j]))
                total += max(
                    (arb(a) + p * arb(r)) * (arb(b) + q * arb(s)) for p in (-1, 1) for q in (-1, 1)
                )
            at = found[i, j]
            assert within(total, at)
            assert total - arb(at.middle.item()) > 0.8 * arb(at.radius.item())


def test_leading_bits_give_the_same_product_in_any_order_of_summation() -> None:
    x, y = random(6, 384, seed=2), random(384, 6, seed=3)
    left, _ = enclosure.leading(x, 19, -1)
    right, _ = enclosure.leading(y, 25, -2)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0))
    one_by_one = sum(left[:, k, None] * right[k] for k in order)
    assert torch.equal(left @ right, one_by_one)
    assert torch.equal(left + (x - left), x)
    exact = arb_mat(left.tolist()) * arb_mat(right.tolist())
    assert all(exact[i, j] == one_by_one[i, j].item() for i in range(6) for j in range(6))


UNARY = {
    "exp": (operator.methodcaller("exp"), lambda x: x.exp(), (-80.0, 3.0)),
    "inverse_root": (operator.methodcaller("inverse_root"), lambda x: 1 / x.sqrt(), (0.5, 60.0)),
}
BINARY = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}


@KINDS
@pytest.mark.parametrize("relative", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_a_function_of_any_number_in_an_enclosure_is_in_its_enclosure(
    name: str, relative: float, kind: type[Enclosure]
) -> None:
    x, y = random(200, spread=2.0), random(200, spread=2.0, seed=1).abs() + 0.1
    if name in UNARY:
        function, exact, (least, most) = UNARY[name]
        x = least + (most - least) * torch.rand(200, generator=torch.Generator().manual_seed(2))
        arguments = [x]
    else:
        function = exact = BINARY[name]
        arguments = [x, y]
    given = [of_kind(kind, t, (relative * t.abs()).float()) for t in arguments]
    found = function(*given)
    for side in (-1, 0, 1):
        at = [
            [v + side * arb(r) for v, r in zip(exactly(e), e.radius.tolist(), strict=True)]
            for e in given
        ]
        for place, numbers in enumerate(zip(*at, strict=True)):
            assert within(exact(*numbers), found[place])
    if kind is Pair and not relative:
        size = sum(t.abs() for t in arguments) if name == "add" else found.middle.abs()
        assert (found.radius <= 2.0**-82 * size + 2.0**-99).all()


@KINDS
@pytest.mark.parametrize("power", [-90, 0, 86, 120])
def test_roots_and_quotients_of_any_size_are_enclosed(power: int, kind: type[Enclosure]) -> None:
    x, small = 2.0**power * (1 + torch.rand(20)), 2.0**-50 * torch.rand(20)
    for share in (0.0, 2.0**-32, 0.25):
        given = of_kind(kind, x, (share * x).float())
        other = of_kind(kind, small, torch.full((20,), 2.0**-100, dtype=torch.float32))
        root, quotient = given.inverse_root(), other / given
        for side in (-1, 1):
            for place, (number, small_one) in enumerate(
                zip(exactly(given), exactly(other), strict=True)
            ):
                at = number + side * arb(given.radius[place].item())
                assert within(1 / at.sqrt(), root[place])
                assert within((small_one + arb(2.0**-100)) / at, quotient[place])


def test_low_digits_are_not_forgotten_where_float64_meets_a_pair() -> None:
    one, zero = constant(torch.ones(1)), torch.zeros(1).float()
    pair = Pair(-torch.ones(1), zero, 2.0**-54 * torch.ones(1))
    for found in (one + pair, one - -pair):
        assert within(arb(2.0**-54), found[0])
    assert within(exactly(pair)[0], (one * pair)[0])
    assert within(exactly(pair)[0], one.joined(pair)[1])


def test_an_exponential_of_a_pair_is_enclosed_wherever_float64_has_one() -> None:
    x = torch.cat([torch.linspace(-760, 700, 400), 2.0 ** torch.arange(-60.0, 9.0)])
    given = of_kind(Pair, x, torch.zeros(x.shape, dtype=torch.float32))
    found = given.exp()
    for place, number in enumerate(exactly(given)):
        exact, at = number.exp(), found[place]
        # Numbers that float32 has no radius for are not known.
        assert at.radius.isinf() if x[place] > 88 + 57 else within(exact, at)
    assert (found.radius <= 2.0**-82 * found.middle + 2.0**-99)[x < 88].all()
    assert paired(constant(torch.tensor([800.0]))).exp().radius.isinf()


@KINDS
def test_an_exponential_of_what_is_hardly_known_is_not_known(kind: type[Enclosure]) -> None:
    wide = of_kind(kind, torch.tensor([0.0, -800.0]), torch.tensor([1.5, 799.0]))
    assert wide.exp().radius.isinf().all()
    assert not wide.map(lambda t: t * math.nan).exp().radius.isfinite().any()


@KINDS
@pytest.mark.parametrize("count", [1, 7, 96])
def test_sums_and_lengths_are_enclosed(count: int, kind: type[Enclosure]) -> None:
    x = random(3, count)
    x = of_kind(kind, x, torch.zeros(x.shape, dtype=torch.float32))
    for row in range(3):
        at_row = x[row]
        numbers = exactly(at_row)
        total, squares = sum(numbers), sum(v * v for v in numbers)
        assert within(total, at_row.sum())
        assert within(squares, at_row.square_sum())
        least = 1e-14 if kind is Enclosure else 1e-28
        assert arb(at_row.square_sum().radius.item()) < least * squares + 2.0**-99
        assert at_row.single().norm_at_least()[0].item() <= squares.sqrt()
        assert at_row.single().norm_at_most().item() >= squares.sqrt()
        shrinkage = 1 / (1 + squares / arb(9)).sqrt()
        mapped = at_row.into_ball(3.0)
        for k, v in enumerate(numbers):
            assert within(v * shrinkage, mapped[k])
