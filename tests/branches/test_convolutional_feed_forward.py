"""Hidden units that see earlier tokens: the formula, the Jacobian, what is proven of it."""

import math

import pytest
import torch

from invformer.branches.feed_forward.activations import ACTIVATION_SLOPE, ACTIVATIONS
from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward
from invformer.lipschitz.local_bounds import local_bound
from invformer.numerics.norms import NORMS
from tests.support.problems import diagonal_norm, jacobian, norm_from_below

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
        dense = jacobian(made, x)
        true = {norm: norm_from_below(dense, norm) for norm in NORMS}
        for norm, value in true.items():
            assert value <= made.lipschitz_bound(norm) * (1 + 1e-12)
        for norm in ("token_max", "frobenius"):
            for tight in (False, True):
                local = local_bound(made, x[None], norm, tight)
                assert true[norm] <= local * (1 + 1e-12) + 1e-15  # 1 − tanh² cancels
        assert diagonal_norm(dense) <= made.causal_bound() <= TARGET
        if kernel == 1:
            assert made.lipschitz_bound("token_max") == made.lipschitz_bound("frobenius") <= TARGET
