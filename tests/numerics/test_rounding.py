"""Outward rounding: no result is below the exact one, with denormals flushed too."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from invformer.numerics.lambert_w import phi_inverse_upper
from invformer.numerics.precision import denormals_flushed
from invformer.numerics.rounding import (
    downwards,
    product_up,
    quotient_up,
    round_up,
    shortened_down,
    sqrt_up,
    sum_up,
    upwards,
)
from invformer.numerics.spectral_norm import spectral_norm_bound

sizes = st.floats(min_value=0, max_value=1e300, allow_subnormal=True)


@given(st.lists(sizes, min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_sums_and_products_are_never_below_the_exact_ones(values: list[float]) -> None:
    exact = [Fraction(v) for v in values]
    assert sum_up(*values) == math.inf or Fraction(sum_up(*values)) >= sum(exact)
    assert product_up(*values) == math.inf or Fraction(product_up(*values)) >= math.prod(exact)


@given(sizes, st.floats(min_value=1e-300, max_value=1e300))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_quotients_and_roots_are_never_below_the_exact_ones(a: float, b: float) -> None:
    quotient, root = quotient_up(a, b), sqrt_up(a)
    assert quotient == math.inf or Fraction(quotient) * Fraction(b) >= Fraction(a)
    assert Fraction(root) ** 2 >= Fraction(a)


def test_round_up_covers_a_long_chain_of_roundings() -> None:
    term = 1 / 3
    total = 0.0
    for _ in range(1000):
        total += term
    assert Fraction(round_up(total, 1000)) >= 1000 * Fraction(term)
    assert round_up(total, 1000) <= total * (1 + 1e-12)


def test_exact_results_stay_exact_and_the_unknown_becomes_infinite() -> None:
    assert product_up(1, 2.5, 1) == 2.5
    assert product_up(0.0, 3.0) == sum_up(0, 0.0) == sqrt_up(0.0) == 0
    assert sum_up(0.5, 0) == 0.5
    assert quotient_up(1, 0) == product_up(0.0, math.inf) == math.inf
    for unknown in (round_up, product_up, sum_up, sqrt_up):
        assert unknown(math.nan) == math.inf


@given(st.floats(min_value=0))
@example(math.nextafter(0.5, 1))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_shown_bound_is_hardly_above_the_bound_and_never_below(bound: float) -> None:
    if math.isfinite(bound):
        exact = Fraction(bound)
        assert 0 <= Fraction(upwards(bound, 6)) - exact < Fraction(1, 10**6)
        assert Fraction(upwards(bound, 6)) <= exact * Fraction(101, 100)
    assert (upwards(0.5, 6), upwards(math.inf, 6)) == ("0.500000", "inf")
    assert upwards(2.991e-5, 4) == "0.0000300"


@given(st.floats(min_value=1e-30, max_value=1e30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_shown_distance_is_not_above_the_distance(length: float) -> None:
    assert length * (1 - 1e-2) <= float(shortened_down(length)) <= length * (1 + 2**-52)
    assert (shortened_down(7.656), shortened_down(math.inf)) == ("7.65", "inf")


def test_a_shown_share_is_one_only_if_nothing_is_missing() -> None:
    assert downwards(1 - 1e-5, 4) < downwards(1.0, 4) == 1
    assert all(downwards(n / 100, 4) == n / 100 for n in range(101))


SUPPORTED = torch.set_flush_denormal(False)


@pytest.mark.skipif(not SUPPORTED, reason="this CPU cannot flush denormals")
def test_denormals_are_zero_inside_and_numbers_again_outside() -> None:
    denormal = torch.tensor(1e-310)
    with denormals_flushed():
        assert (denormal * 1).item() == 0
        with denormals_flushed():
            pass
        assert (denormal * 1).item() == 0
    assert (denormal * 1).item() == 1e-310
    with pytest.raises(ZeroDivisionError), denormals_flushed():
        raise ZeroDivisionError
    assert (denormal * 1).item() == 1e-310


@pytest.mark.skipif(not SUPPORTED, reason="this CPU cannot flush denormals")
def test_no_bound_is_flushed_to_zero_with_the_denormals() -> None:
    small = 1e-310
    weights = [torch.full((2, 2), 1e-40, dtype=torch.float32), torch.full((2, 2), 1e-39).bfloat16()]
    weights += [torch.full((3, 2), 6e-8).half(), torch.full((2, 2), 1e-310)]
    truths = [2e-40, 2e-39, 1e-7, 2e-310]
    with denormals_flushed():
        bounds = [spectral_norm_bound(w).view(torch.int64).item() for w in weights]
        up = [
            product_up(small, 1e200), product_up(1e-200, 1e-200), sum_up(small, 0.0),
            sqrt_up(small), quotient_up(small, 1e-300), phi_inverse_upper(-714.0),
        ]  # fmt: skip
        assert spectral_norm_bound(torch.zeros(2, 2)).view(torch.int64).item() == 0
    assert torch.tensor(bounds[2]).view(torch.float64).item() < 1.5e-7
    for bits, truth in zip(bounds, truths, strict=True):
        assert torch.tensor(bits).view(torch.float64).item() >= truth
    exact = [small * 1e200, 0.0, small, math.sqrt(small), small / 1e-300, math.exp(-715)]
    assert all(bound >= value for bound, value in zip(up, exact, strict=True))
