"""How inverse layers pass errors on."""

import math

import pytest
import torch

from invformer.numerics.error_bound import (
    contraction_error_bound,
    residual_step,
    scale_step,
    stack_error_bound,
)
from invformer.numerics.fixed_point import invert_residual
from invformer.numerics.norms import NORMS, Norm, vector_norm
from tests.numerics.contractions import CONSTANTS, two_layers


def test_the_stack_bound_is_the_recursion_written_out() -> None:
    y = torch.randn(2, 3, 2)
    log_scale, shift = torch.tensor([0.5, -1.0]), torch.zeros(2)
    scale = scale_step(y, log_scale, shift, "token_max")
    top, bottom = torch.tensor([1e-3, 2e-3]), torch.tensor([1e-5, 0.0])
    bound = stack_error_bound([residual_step(top, 0.5), scale, residual_step(bottom, 0.75)])
    by_hand = bottom + 4 * math.e * top
    assert (bound >= by_hand).all()
    torch.testing.assert_close(bound, by_hand, rtol=1e-5, atol=0)
    assert stack_error_bound([]) == 0


def test_the_rounding_of_a_scaling_there_and_back_is_in_its_bound() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float32)
    log_scale, shift = torch.tensor([0.5, -1.0]).float(), torch.tensor([1e4, -1e4]).float()
    y = x * log_scale.exp() + shift  # which has lost the last digits of x
    back = (y - shift) * (-log_scale).exp()
    bound = stack_error_bound([scale_step(y, log_scale, shift, "token_max")])
    error = (back.double() - x).norm(dim=-1).amax(-1)
    assert (error > 1e-4).all()
    assert (error <= bound).all()


def test_an_error_comes_back_in_other_scales_only_as_far_as_channels_allow() -> None:
    # Errors of the upper layer are large in channel 0, which the lower one hardly reads.
    log_scale = torch.tensor([math.log(0.01), 0.0])
    y, none, error = torch.zeros(1, 1, 2), torch.zeros(1), torch.tensor([1e-3])
    undone = scale_step(y, log_scale, torch.zeros(2), "token_max")
    entered = scale_step(y, -log_scale, torch.zeros(2), "token_max")
    bound = stack_error_bound(
        [residual_step(error, 0.5), undone, entered, residual_step(none, 0.5)]
    )
    assert 2e-3 <= bound.item() <= 2e-3 * (1 + 1e-4)  # 0.1 by the largest scales alone


@pytest.mark.parametrize("constant", [1.0, 1.5, math.inf, math.nan])
def test_constants_from_one_on_bound_no_error_not_even_of_a_zero_residual(constant: float) -> None:
    for residual in (torch.zeros(3), torch.ones(3)):
        assert (contraction_error_bound(residual, constant) == math.inf).all()
        steps = [residual_step(residual, constant), residual_step(torch.zeros(3), 0.5)]
        assert (stack_error_bound(steps) == math.inf).all()


@pytest.mark.parametrize(("spread", "rtol"), [(0.5, 0.03), (3.0, None)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("c", CONSTANTS)
def test_the_true_error_of_a_stack_is_never_above_its_bound(
    c: float, norm: Norm, dtype: torch.dtype, spread: float, rtol: float | None
) -> None:
    """Through three residual layers and two scales and back."""
    layers = [two_layers(4, 6, c, norm, dtype) for _ in range(3)]
    log_scale, shift = (spread * torch.randn(2, 6)).to(dtype), torch.randn(2, 6).to(dtype)
    z = x = torch.randn(40, 4, 6).to(dtype)
    for i, f in enumerate(layers):
        z = z + f(z)
        if i < 2:
            z = z * log_scale[i].exp() + shift[i]
    steps = []
    for i in (2, 1, 0):
        if i < 2:
            steps.append(scale_step(z, log_scale[i], shift[i], norm))
            z = (z - shift[i]) * (-log_scale[i]).exp()
        solution = invert_residual(
            layers[i], z, lipschitz_bound=c, norm=norm, residual_map=layers[i],
            rtol=rtol,
        )  # fmt: skip
        steps.append(residual_step(solution.error_bound, c))
        z = solution.value
    bound = stack_error_bound(steps)
    assert bound.isfinite().all()
    assert (vector_norm(z.double() - x.double(), norm) <= bound).all()
