"""Feed-forwards: the formula, constants everywhere and at an input, enclosures."""

import math

import mpmath
import pytest
import torch

from invformer.branches.feed_forward import bounds
from invformer.branches.feed_forward import enclosed as enclosed_feed_forward
from invformer.branches.feed_forward.activations import (
    ACTIVATION_SLOPE,
    ACTIVATIONS,
    activation_slope,
)
from invformer.branches.feed_forward.bounds import feed_forward_bounds
from invformer.branches.feed_forward.enclosed import activate
from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward
from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.norms import NORMS, Norm
from invformer.numerics.pairs import Pair, paired
from tests.support import problems

ACTIVATION = {
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "tanh": mpmath.tanh,
}


@pytest.mark.parametrize(("name", "near"), [("gelu", 1.4), ("silu", 2.4)])
def test_the_largest_slope_is_rounded_up_in_the_seventh_decimal(name: str, near: float) -> None:
    function = ACTIVATION[name]
    with mpmath.workdps(40):
        peak = mpmath.findroot(lambda x: mpmath.diff(function, x, 2), near)
        largest = mpmath.diff(function, peak)
        assert largest <= ACTIVATION_SLOPE[name] <= largest + mpmath.mpf("1e-7")


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_layer_is_exactly_as_steep_as_its_bound(norm: Norm) -> None:
    weight = torch.randn(5, 5)
    jac = problems.jacobian(lambda x: x @ weight, torch.randn(2, 5))
    bound = problems.of_one_layer(feed_forward_bounds, weight, torch.eye(5), "relu", norm)
    assert (1 - 1e-5) * bound <= problems.norm_from_below(jac, norm) <= bound


def test_the_bound_is_exact_in_chunks_of_any_size_and_the_fast_one_above_it(monkeypatch) -> None:
    x, w_in, w_out = torch.randn(3, 5, 6), torch.randn(6, 10) / 2, torch.randn(10, 6) / 2
    slope = 1 - torch.tanh(x @ w_in).square()
    dense = [problems.dense_jacobian(lambda z: torch.tanh(z @ w_in) @ w_out, one) for one in x]
    exact = torch.linalg.matrix_norm(torch.stack(dense), 2)
    bound = bounds.exact_local_bound(slope, w_in, w_out)
    assert (bound >= exact).all()
    torch.testing.assert_close(bound, exact, rtol=1e-5, atol=0)
    fast = bounds.fast_local_bound(slope, w_in, w_out)
    assert (fast >= bound).all()
    assert (fast <= 4 * exact).all()
    for numbers in (1, 2 * w_in.numel()):
        monkeypatch.setattr(bounds, "CHUNK_ELEMENTS", numbers)
        torch.testing.assert_close(bounds.exact_local_bound(slope, w_in, w_out), bound)


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
    x = torch.linspace(-40, 40, 400_000, requires_grad=True)
    (slope,) = torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)
    least, most = ACTIVATION_SLOPE[name], enclosed_feed_forward.SLOPE[name]
    assert 0.999 * least < slope.abs().max() <= least <= most
    error = activation_slope(name, x.float()) - slope
    assert error.abs().max() <= enclosed_feed_forward.SLOPE_ERROR / 2
    if name != "relu":
        assert (slope.diff() / x.diff()).abs().max() <= enclosed_feed_forward.CURVATURE[name]


@pytest.mark.parametrize("relative", [1e-9, 1e-2, 1.0])
@pytest.mark.parametrize("name", list(ACTIVATION))
def test_an_activation_of_an_enclosure_encloses_all_values(name: str, relative: float) -> None:
    x = 4 * torch.randn(2000, generator=torch.Generator().manual_seed(1))
    radius = (relative * (x.abs() + 0.1)).float()
    found = activate(Enclosure(x, radius), name)
    for share in torch.linspace(-1, 1, 9):
        value = ACTIVATIONS[name](x + share * radius)
        assert ((value - found.middle).abs() <= found.radius + 1e-15).all()


@pytest.mark.parametrize("name", list(ACTIVATION))
def test_silu_and_relu_of_a_pair_are_enclosed_with_more_digits(name: str) -> None:
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


TOKENS, WIDTH, HIDDEN, TARGET = 6, 5, 11, 0.9


def layer(kernel: int = 3, seed: int = 0, activation="silu") -> ContractiveFeedForward:
    """A layer with nothing at its start value."""
    torch.manual_seed(seed)
    made = ContractiveFeedForward(WIDTH, HIDDEN, TARGET, activation, kernel=kernel)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("kernel", [2, 4, TOKENS + 1])
def test_its_outputs_are_those_of_a_loop_over_tokens_and_lags(kernel: int) -> None:
    made = layer(kernel)
    w_in, w_out = made.w_in(), made.target_scale() / ACTIVATION_SLOPE["silu"] * made.w_out()
    b_in, sharpness = made.b_in, made.log_sharpness.exp()
    w_past = made.w_past / sharpness
    x = torch.randn(TOKENS, WIDTH)
    expected = []
    for i in range(TOKENS):
        hidden = x[i] @ w_in + b_in
        for lag in range(1, min(kernel, i + 1)):
            hidden = hidden + x[i - lag] @ w_past[(lag - 1) * WIDTH : lag * WIDTH]
        expected.append(ACTIVATIONS["silu"](sharpness * hidden) / sharpness @ w_out)
    torch.testing.assert_close(made(x), torch.stack(expected))
    together = made.weights_of([layer(kernel, seed=1), made])[1]
    for weights in (together, made.weights()):
        torch.testing.assert_close(made(x, weights), torch.stack(expected))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "tanh"])
@pytest.mark.parametrize(
    ("scale", "sharpnesses"), [(0.1, (None, 50.0)), (1.0, (0.5, 4.0)), (10.0, (None, 50.0))]
)
def test_true_constants_stay_below_local_bounds_below_certificates_however_sharp(
    kernel: int, activation: str, scale: float, sharpnesses: tuple[float | None, float]
) -> None:
    for seed, sharpness in enumerate(sharpnesses):
        made = layer(kernel, seed, activation)
        if sharpness is not None:
            made.log_sharpness.data.fill_(math.log(sharpness))
        x = scale * torch.randn(TOKENS, WIDTH)
        dense = problems.jacobian(made, x)
        true = {norm: problems.norm_from_below(dense, norm) for norm in NORMS}
        for norm, value in true.items():
            assert value <= made.lipschitz_bound(norm) * (1 + 1e-12)
        for norm in ("token_max", "frobenius"):
            for tight in (False, True):
                local = made.local_bound(x[None], norm, tight)
                assert true[norm] <= local * (1 + 1e-12) + 1e-15  # 1 − tanh² cancels
        assert problems.diagonal_norm(dense) <= made.causal_bound() <= TARGET
        if kernel == 1:
            assert made.lipschitz_bound("token_max") == made.lipschitz_bound("frobenius") <= TARGET
