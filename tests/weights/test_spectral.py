"""The differentiable normaliser: an upper bound, a function of the weight alone."""

import copy

import pytest
import torch
from torch.func import functional_call, grad

from invformer.assemble.model import build_model
from invformer.config.schema import ModelConfig
from invformer.weights.spectral import SpectralNormalised, refresh_normalisers, set_manual_refresh
from tests.gpu.emulation import cuda_rules
from tests.support.launches import Launches


def test_the_gradient_is_that_of_the_weight_over_its_spectral_norm() -> None:
    raw = torch.randn(6, 4)
    probe = torch.randn(6, 4)
    weight = SpectralNormalised(raw.clone())
    (weight() * probe).sum().backward()
    exact = raw.clone().requires_grad_()
    (exact / torch.linalg.matrix_norm(exact, 2) * probe).sum().backward()
    torch.testing.assert_close(weight.weight.grad, exact.grad, rtol=3e-2, atol=3e-3)


def test_a_weight_changed_behind_manual_refresh_is_seen_after_the_refresh() -> None:
    model = torch.nn.ModuleList(SpectralNormalised(torch.randn(4, 4)) for _ in range(3))
    set_manual_refresh(model)
    with torch.no_grad():
        for weight in model:
            weight.weight.mul_(7)
    assert all(torch.linalg.matrix_norm(w(), 2).item() > 2 for w in model)
    refresh_normalisers(model)
    assert all(torch.linalg.matrix_norm(w(), 2).item() <= 1 for w in model)


def scaled(weight: SpectralNormalised) -> None:
    weight.weight.data.mul_(3)


def replaced(weight: SpectralNormalised) -> None:
    weight.weight = torch.nn.Parameter(3 * weight.weight.detach())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [scaled, replaced])
def test_a_changed_weight_has_the_constant_of_its_new_value(change, training: bool) -> None:
    weight = SpectralNormalised(torch.randn(4, 4)).train(training)
    expected = weight().clone()
    change(weight)
    torch.testing.assert_close(weight(), expected)
    other = copy.deepcopy(weight)
    change(other)
    torch.testing.assert_close(other(), expected)
    torch.testing.assert_close(weight(), expected)


def test_a_weight_put_in_for_one_call_is_normalised_for_that_call() -> None:
    weight = SpectralNormalised(torch.randn(4, 4)).eval()
    expected = weight().detach()
    for factor in (2, 5):
        given = {"weight": factor * weight.weight.detach()}
        torch.testing.assert_close(functional_call(weight, given, ()), expected)
    torch.testing.assert_close(weight(), expected)

    def total(given: torch.Tensor) -> torch.Tensor:
        return functional_call(weight, {"weight": given}, ()).sum()

    gradient = grad(total)(3 * weight.weight.detach())
    assert (gradient * weight.weight).sum().abs() < 1e-3  # its size is divided away
    torch.testing.assert_close(weight(), expected)


def test_constants_computed_in_inference_mode_let_gradients_through() -> None:
    weight = SpectralNormalised(torch.randn(4, 4))
    with torch.inference_mode():
        set_manual_refresh(weight)
    weight().sum().backward()
    assert weight.weight.grad is not None


def test_constants_and_weights_of_more_layers_take_hardly_more_launches() -> None:
    def launches(num_layers: int) -> tuple[int, int]:
        model = build_model(ModelConfig(d_model=24, num_heads=3, num_layers=num_layers), 11, 8)
        set_manual_refresh(model)
        with cuda_rules(), Launches() as constants:
            refresh_normalisers(model)
        with Launches() as weights:
            model.weights()
        return constants.count, weights.count

    few, many = launches(2), launches(6)  # of constants, of weights
    assert many[0] == few[0] <= 150
    assert many[1] <= few[1] + 4 * 2  # the target of each branch
