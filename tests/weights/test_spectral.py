"""Normalised weights, and dropout: masks are a function of seed, sample and layer."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from invformer.assemble.model import build_model
from invformer.config.schema import ModelConfig
from invformer.nn import NoCertificateError, certify
from invformer.weights.dropout import Dropout, sample_keys, set_sample_keys
from invformer.weights.spectral import SpectralNormalised, refresh_normalisers, set_manual_refresh
from tests.gpu.emulation import cuda_rules
from tests.support.builders import SEQ_LEN, WIDTH, contractive_model
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


ONES = torch.ones(6, 50, 40)


def masks(first: int, count: int, seed: int = 3, p: float = 0.2) -> list[torch.Tensor]:
    """The masks of two layers."""
    model = nn.Sequential(Dropout(p), nn.Sequential(Dropout(p)))
    set_sample_keys(model, sample_keys(seed, first, count))
    return [layer(ONES[:count].clone()) * (1 - p) for layer in (model[0], model[1][0])]


def test_a_sample_has_the_same_masks_in_every_batch() -> None:
    for whole, begin, end in zip(masks(6, 6), masks(6, 2), masks(8, 4), strict=True):
        assert torch.equal(whole, torch.cat([begin, end]))
    assert all(map(torch.equal, masks(6, 6), masks(6, 6)))


def test_other_samples_layers_and_seeds_have_masks_that_are_independent() -> None:
    where = (0, 3), (1 << 32, 3), (0, 4), (0, (1 << 32) - 1)  # first sample, seed
    found = [mask for first, seed in where for mask in masks(first, 3, seed)]
    rows = torch.cat([mask.flatten(1) for mask in found]).double()
    correlation = torch.corrcoef(rows)
    for i, j in itertools.combinations(range(len(rows)), 2):
        assert abs(correlation[i, j]) < 5 / rows.shape[1] ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_a_mask_drops_the_share_that_was_asked_for(p: float) -> None:
    mask = torch.stack(masks(0, 6, p=p))
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert mask.unique().tolist() == pytest.approx([0, 1])
    assert float((mask == 0).double().mean()) == pytest.approx(p, abs=5 * deviation)


def test_without_keys_or_training_it_is_pytorchs() -> None:
    layer = Dropout(0.5)
    torch.manual_seed(0)
    ours = layer(ONES)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.functional.dropout(ONES, 0.5))
    set_sample_keys(layer, sample_keys(0, 0, 6))
    assert torch.equal(layer.eval()(ONES), ONES)


@pytest.mark.parametrize("scaled", [False, True])
def test_dropout_in_certified_branches_changes_training_and_nothing_else(scaled: bool) -> None:
    plain, dropped = (contractive_model(scaled=scaled, dropout=p).stack for p in (0.0, 0.3))
    dropped.load_state_dict(plain.state_dict())
    x = torch.randn(2, SEQ_LEN, WIDTH)
    z = plain(x).detach()
    for folded in (False, True):
        assert not torch.allclose(dropped(x, folded=folded), z, rtol=0.01)
    assert torch.equal(dropped.eval()(x), z)
    with torch.no_grad():
        for mode in (True, False):
            assert torch.equal(dropped.train(mode).inverse(z).value, plain.inverse(z).value)
    assert certify(dropped) == certify(plain)


def test_another_module_in_the_place_of_dropout_is_not_certified() -> None:
    stack = contractive_model(dropout=0.3).stack
    stack.blocks[1].attention.dropout = nn.LeakyReLU(2.0)
    with pytest.raises(NoCertificateError, match="block_01/attention: no proof is known for Leaky"):
        certify(stack)
