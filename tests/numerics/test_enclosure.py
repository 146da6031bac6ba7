"""Enclosures contain what Arb says, for exact arguments and for any within the radii."""

import math
import operator

import pytest
import torch
from flint import arb, arb_mat, ctx

from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, constant

ctx.prec = 200


def random(*shape: int, spread: float = 6.0, seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(spread * torch.randn(shape, generator=generator))
    return size * torch.randn(shape, generator=generator)


def within(exact: arb, found: Enclosure) -> bool:
    """Whether one exact number lies in one enclosure."""
    return bool(abs(exact - arb(found.middle.item())) <= arb(found.radius.item()))


@pytest.mark.parametrize("inner", [1, 3, 24, 384])
@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_enclosed_and_if_split_better_than_in_float64(
    inner: int, spread: float, dtype: torch.dtype, split: bool
) -> None:
    x, y = random(5, inner, spread=spread), random(inner, 4, spread=spread, seed=1).to(dtype)
    x[1] = 0.0
    found = constant(x).matmul(enclosure.Matrix(constant(y), split))
    exact = arb_mat(x.tolist()) * arb_mat(y.double().tolist())
    for i in range(5):
        for j in range(4):
            assert within(exact[i, j], found[i, j])
    plain = inner * enclosure.U * x.abs() @ y.double().abs()
    if split and inner == 384 and spread == 0:
        assert (found.radius < plain / 20)[x.any(-1)].all()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("relative", [1e-12, 1e-3, 2.0])
def test_a_product_of_any_factors_in_enclosures_is_enclosed(relative: float, split: bool) -> None:
    x, y = random(4, 24, spread=1.0), random(24, 4, spread=1.0, seed=1)
    by, of = (relative * x.abs()).float(), (relative * random(24, 4, seed=2).abs()).float()
    third = Enclosure(random(4, 4, seed=3), (relative * random(4, 4, seed=4).abs()).float())
    found = Enclosure(x, by).matmul(enclosure.Matrix(Enclosure(y, of), split), third)
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
    "exp": (Enclosure.exp, lambda x: x.exp(), (-80.0, 3.0)),
    "inverse_root": (Enclosure.inverse_root, lambda x: 1 / x.sqrt(), (0.5, 60.0)),
}
BINARY = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}


@pytest.mark.parametrize("relative", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_a_function_of_any_number_in_an_enclosure_is_in_its_enclosure(
    name: str, relative: float
) -> None:
    x, y = random(200, spread=2.0), random(200, spread=2.0, seed=1).abs() + 0.1
    if name in UNARY:
        function, exact, (least, most) = UNARY[name]
        x = least + (most - least) * torch.rand(200, generator=torch.Generator().manual_seed(2))
        pairs = [(x, (relative * x.abs()).float())]
    else:
        function = exact = BINARY[name]
        pairs = [(x, (relative * x.abs()).float()), (y, (relative * y).float())]
    found = function(*(Enclosure(*pair) for pair in pairs))
    for place in range(200):
        for side in (-1, 0, 1):
            arguments = [arb(m[place].item()) + side * arb(r[place].item()) for m, r in pairs]
            assert within(exact(*arguments), found[place])


def test_an_exponential_of_what_is_hardly_known_is_not_known() -> None:
    wide = Enclosure(torch.tensor([0.0, -800.0]), torch.tensor([1.5, 799.0]))
    assert wide.exp().radius.isinf().all()
    assert not wide.map(lambda t: t * math.nan).exp().radius.isfinite().any()


@pytest.mark.parametrize("count", [1, 7, 96])
def test_sums_and_lengths_are_enclosed(count: int) -> None:
    x = random(3, count)
    numbers = [[arb(v) for v in row] for row in x.tolist()]
    for row in range(3):
        total, squares = sum(numbers[row]), sum(v * v for v in numbers[row])
        at_row = constant(x[row])
        assert within(total, at_row.sum())
        assert within(squares, at_row.square_sum())
        assert arb(at_row.square_sum().radius.item()) < 1e-14 * squares
        assert at_row.norm_at_least()[0].item() <= squares.sqrt()
        assert at_row.norm_at_most().item() >= squares.sqrt()
        shrinkage = 1 / (1 + squares / arb(9)).sqrt()
        mapped = at_row.into_ball(3.0)
        for k, v in enumerate(numbers[row]):
            assert within(v * shrinkage, mapped[k])


def test_a_pair_keeps_what_float64_loses() -> None:
    x, y, f = random(50), random(50, seed=1), random(50, seed=2).float().double()
    pair = (constant(x).paired() + constant(y).paired()).times(f)
    at = pair.affine(constant(f).paired(), constant(x).paired())
    for k in range(50):
        exact = (arb(x[k].item()) + arb(y[k].item())) * arb(f[k].item())
        error = abs(exact - arb(pair.high[k].item()) - arb(pair.low[k].item()))
        assert error <= arb(pair.radius[k].item())
        assert pair.radius[k] <= 1e-28 * (1 + (abs(x[k]) + abs(y[k])) * abs(f[k]))
        exact = exact * arb(f[k].item()) + arb(x[k].item())
        assert within(exact, at[k])
