"""Constants of feed-forwards, everywhere and at an input."""

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from invformer.branches.feed_forward import bounds
from invformer.branches.feed_forward.activations import ACTIVATION_SLOPE, ACTIVATIONS
from invformer.branches.feed_forward.bounds import feed_forward_bounds
from invformer.numerics.norms import NORMS, Norm
from tests.support.problems import (
    dense_jacobian,
    jacobian,
    matrix_with,
    norm_from_below,
    of_one_layer,
)


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


def feed_forward_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slopes of tanh at random inputs, both maps, and the exact norm per sequence."""
    x, w_in, w_out = torch.randn(3, 5, 6), torch.randn(6, 10) / 2, torch.randn(10, 6) / 2
    exact = [
        torch.linalg.matrix_norm(dense_jacobian(lambda z: torch.tanh(z @ w_in) @ w_out, sample), 2)
        for sample in x
    ]
    return 1 - torch.tanh(x @ w_in).square(), w_in, w_out, torch.stack(exact)


def test_the_feed_forward_bound_is_exact_and_the_fast_one_above_it() -> None:
    slope, w_in, w_out, exact = feed_forward_case()
    bound = bounds.exact_local_bound(slope, w_in, w_out)
    assert (bound >= exact).all()
    torch.testing.assert_close(bound, exact, rtol=1e-5, atol=0)
    fast = bounds.fast_local_bound(slope, w_in, w_out)
    assert (fast >= bound).all()
    assert (fast <= 4 * exact).all()


def test_the_feed_forward_bound_is_the_same_for_all_tokens_at_once_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slope, w_in, w_out, _ = feed_forward_case()
    together = bounds.exact_local_bound(slope, w_in, w_out)
    assert together.shape == slope.shape[:1]
    for numbers in (1, 2 * w_in.numel()):
        monkeypatch.setattr(bounds, "CHUNK_ELEMENTS", numbers)
        torch.testing.assert_close(bounds.exact_local_bound(slope, w_in, w_out), together)


def test_the_fast_feed_forward_bound_is_exact_for_constant_slopes_of_either_sign() -> None:
    w_in, w_out = torch.randn(6, 10), torch.randn(10, 6)
    for value in (0.7, -0.1):
        bound = bounds.fast_local_bound(torch.full((5, 10), value), w_in, w_out)
        exact = abs(value) * torch.linalg.matrix_norm(w_in @ w_out, 2)
        torch.testing.assert_close(bound, exact, rtol=1e-5, atol=0)
