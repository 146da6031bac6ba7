"""Branches that contract in weighted norms of their own: y = x + D⁻¹ f(D x + b)."""

import math
from typing import Any

import pytest
import torch

from invformer.errors import NonFiniteError
from invformer.nn import certify, enforce, residual
from invformer.nn.residual import FoldedWeights
from tests.support.builders import SEQ_LEN, WIDTH, random_tokens, scaled_model, trained_a_little

MODELS = [
    {},
    {"kernel": 3},
    {"certificate": "token_max", "bounded": False, "strictly_causal": False},
    {"certificate": "token_max", "strictly_causal": False, "input_radius": 2.0},
]


@pytest.mark.parametrize("options", MODELS)
def test_a_block_is_the_same_function_with_scalings_folded_into_its_weights(options: dict) -> None:
    model = trained_a_little(scaled_model(**options))
    x = model.embedding(random_tokens(2)).detach().requires_grad_()
    parameters = [x, *model.stack.parameters()]
    folded, plain = model.stack(x, folded=True), x
    for _, layer in model.stack.residual_layers():
        u = layer.scaling(plain)
        plain = plain + layer.f(u) * (-layer.scaling.log_scale).exp()
    torch.testing.assert_close(folded, plain, rtol=1e-11, atol=1e-11)
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            assert torch.equal(model.stack(x), plain)
    ours = torch.autograd.grad(folded.sin().sum(), parameters)
    expected = torch.autograd.grad(plain.sin().sum(), parameters)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


def test_a_certificate_and_an_inverse_cannot_take_folded_weights() -> None:
    stack = scaled_model().stack
    weights: Any = stack.weights(folded=True)
    for use in (certify, lambda stack, weights: stack.inverse(torch.zeros(1, 2, WIDTH), weights)):
        with pytest.raises(AttributeError, match="'FoldedWeights' object has no attribute"):
            use(stack, weights=weights)


@pytest.mark.parametrize("options", MODELS)
def test_under_autocast_weights_are_folded_too_for_the_same_function(options: dict) -> None:
    model = trained_a_little(scaled_model(**options), steps=10)
    x = model.embedding(random_tokens(2)).detach()
    expected = model.stack(x)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        weights = model.stack.weights(folded=True)
        found = model.stack(x.float(), weights)
    for name, branch in model.stack.branches():
        folds = branch.folds_scaling and "input_radius" not in options
        assert isinstance(weights[name], FoldedWeights) == folds
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


def test_under_autocast_gradients_are_added_as_it_would_add_them(monkeypatch) -> None:
    model, tokens = scaled_model().float(), random_tokens(2)

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, folded=True).float().sin().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    ours = gradients()
    monkeypatch.setattr(residual, "in_two_formats", lambda x: (x, x))
    assert all(map(torch.equal, ours, gradients()))


@pytest.mark.parametrize("log_scale", [800.0, -800.0])
def test_a_scale_out_of_range_is_named_and_nothing_is_proven(log_scale: float) -> None:
    model = scaled_model()
    z = model.stack(model.embedding(random_tokens(1))).detach()
    with torch.no_grad():
        model.stack.blocks[1].feed_forward.scaling.log_scale[2] = log_scale
    assert math.isinf(certify(model, kind="global").total)
    solution = model.stack.inverse(z, throw=False)
    assert solution.error_bound.isinf().all()
    with pytest.raises(NonFiniteError, match="block_01/feed_forward"):
        enforce(model, torch.float64)


@pytest.mark.parametrize("bounded", [True, False])
def test_large_inputs_and_one_much_larger_are_initialised_to_finite_outputs(bounded: bool) -> None:
    stack = scaled_model(bounded=bounded, strictly_causal=bounded).stack.float()
    x = 4e5 * torch.randn(8, SEQ_LEN, WIDTH, dtype=torch.float32)
    x[0] *= 1000
    stack.initialise(x)
    assert stack(x).isfinite().all()
    for _, layer in stack.residual_layers():
        assert (layer.scaling(x).flatten(0, 1).std(0) < 100).all()
