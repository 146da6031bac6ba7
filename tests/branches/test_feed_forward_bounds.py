"""Constants of layers that act on one token at a time."""

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch.nn import functional as F

from invformer.branches.feed_forward.bounds import ACTIVATION_SLOPE, feed_forward_bounds
from invformer.branches.feed_forward.feed_forward import ACTIVATIONS
from invformer.numerics.norms import NORMS, Norm
from tests.support.problems import jacobian, matrix_with, norm_from_below, of_one_layer


def gelu(x: mpmath.mpf) -> mpmath.mpf:
    return x * mpmath.ncdf(x)


def silu(x: mpmath.mpf) -> mpmath.mpf:
    return x / (1 + mpmath.exp(-x))


@pytest.mark.parametrize(("name", "function", "near"), [("gelu", gelu, 1.4), ("silu", silu, 2.4)])
def test_the_largest_slope_is_rounded_up_in_the_seventh_decimal(
    name: str, function: Callable[[mpmath.mpf], mpmath.mpf], near: float
) -> None:
    with mpmath.workdps(40):
        peak = mpmath.findroot(lambda x: mpmath.diff(function, x, 2), near)
        largest = mpmath.diff(function, peak)
        assert largest <= ACTIVATION_SLOPE[name] <= largest + mpmath.mpf("1e-7")


@pytest.mark.parametrize("name", ACTIVATION_SLOPE)
def test_no_slope_on_a_fine_grid_exceeds_the_constant(name: str) -> None:
    x = torch.linspace(-12, 12, 100_001, requires_grad=True)
    (slope,) = torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)
    assert 0.999 * ACTIVATION_SLOPE[name] < slope.abs().max() <= ACTIVATION_SLOPE[name]


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_layer_is_exactly_as_steep_as_its_bound(norm: Norm) -> None:
    weight = torch.randn(5, 5)
    jac = jacobian(lambda x: x @ weight, torch.randn(2, 5))
    bound = of_one_layer(feed_forward_bounds, weight, torch.eye(5), "relu", norm)
    assert (1 - 1e-5) * bound <= norm_from_below(jac, norm) <= bound


def test_an_aligned_relu_attains_the_feed_forward_bound() -> None:
    rotation = matrix_with(torch.ones(6), 6, 6)
    jac = jacobian(lambda x: F.relu(x @ rotation + 100) @ rotation.T, torch.zeros(2, 6))
    for norm in ("token_max", "frobenius"):
        bound = of_one_layer(feed_forward_bounds, rotation, rotation.T, "relu", norm)
        assert (1 - 1e-5) * bound <= norm_from_below(jac, norm) <= bound
