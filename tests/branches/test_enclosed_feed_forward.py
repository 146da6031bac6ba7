"""Activations in enclosures, held against forty and sixty digits."""

import math

import mpmath
import pytest
import torch

from invformer.branches.feed_forward import enclosed as enclosed_feed_forward
from invformer.branches.feed_forward.activations import ACTIVATIONS, activation_slope
from invformer.branches.feed_forward.enclosed import activate
from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.pairs import Pair, paired

ACTIVATION = {
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "tanh": mpmath.tanh,
}


@pytest.mark.parametrize("name", ["exp", "rsqrt", *ACTIVATION])
def test_the_library_errs_by_less_than_half_of_what_is_assumed_of_it(name: str) -> None:
    x = 6 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.linspace(-30, 30, 1001)]) + 1e-9
    x = x.abs() if name == "rsqrt" else x
    function = {"exp": torch.exp, "rsqrt": torch.rsqrt, **ACTIVATIONS}[name]
    oracle = {"exp": mpmath.exp, "rsqrt": lambda v: 1 / mpmath.sqrt(v), **ACTIVATION}[name]
    allowed = enclosure.EXP if name in ("exp", "rsqrt") else enclosed_feed_forward.ACTIVATION_ERROR
    with mpmath.workdps(40):
        for v, found in zip(x.tolist(), function(x).tolist(), strict=True):
            exact = oracle(mpmath.mpf(v))
            scale = abs(mpmath.mpf(v)) if name == "gelu" else abs(exact)
            assert abs(found - exact) <= allowed / 2 * scale


@pytest.mark.parametrize("name", list(ACTIVATION))
def test_slopes_and_curvatures_bound_those_of_the_activations(name: str) -> None:
    x = torch.linspace(-40, 40, 400_000)
    slope = activation_slope(name, x)
    assert slope.abs().max() <= enclosed_feed_forward.SLOPE[name]
    assert (
        activation_slope(name, x.float()) - slope
    ).abs().max() <= enclosed_feed_forward.SLOPE_ERROR / 2
    if name != "relu":
        assert (slope.diff() / x.diff()).abs().max() <= enclosed_feed_forward.CURVATURE[name]


@pytest.mark.parametrize("relative", [1e-9, 1e-2, 1.0])
@pytest.mark.parametrize("name", list(ACTIVATION))
def test_an_activation_of_any_number_in_an_enclosure_is_in_its_enclosure(
    name: str, relative: float
) -> None:
    x = 4 * torch.randn(2000, generator=torch.Generator().manual_seed(1))
    radius = (relative * (x.abs() + 0.1)).float()
    found = activate(Enclosure(x, radius), name)
    for share in torch.linspace(-1, 1, 9):
        value = ACTIVATIONS[name](x + share * radius)
        assert ((value - found.middle).abs() <= found.radius + 1e-15).all()


@pytest.mark.parametrize("name", list(ACTIVATION))
def test_an_activation_of_a_pair_is_enclosed_with_more_digits_if_it_is_silu_or_relu(
    name: str,
) -> None:
    x = torch.cat([torch.linspace(-300, 300, 101), torch.linspace(-6, 6, 101) + 1e-9])
    found = activate(paired(constant(x)), name)
    with mpmath.workdps(60):
        for place, number in enumerate(x.tolist()):
            middle = mpmath.mpf(found.middle[place].item())
            if isinstance(found, Pair):
                middle += mpmath.mpf(found.low[place].item())
            away = abs(ACTIVATION[name](mpmath.mpf(number)) - middle)
            assert away <= found.radius[place].item()
    assert isinstance(found, Pair) == (name in ("silu", "relu"))
    if isinstance(found, Pair):
        assert (found.radius <= 2.0**-79 * found.middle.abs() + 2.0**-98 * (1 + x.abs())).all()


def test_relu_of_no_number_is_no_number() -> None:
    zero = torch.zeros(1)
    found = activate(Pair(zero * math.nan, zero.float(), zero), "relu")
    assert found.middle.isnan().all()


def test_relu_passes_on_an_enclosure_that_reaches_just_beyond_zero() -> None:
    x = Enclosure(torch.tensor([-1.0]), torch.tensor([1 + 2.0**-23], dtype=torch.float32))
    assert activate(x, "relu").radius >= 2.0**-23
