"""Layers, couplings and stacks: what they compute, their inverses, inputs in a ball."""

import math
from functools import partial

import pytest
import torch

from invformer.nn import (
    ActivationNorm,
    CausalMask,
    ContractiveFeedForward,
    CouplingStack,
    InvertibleResidual,
    L2Attention,
    certify,
    enforce,
)
from invformer.nn.transformer import CharTransformer
from invformer.numerics.fixed_point_solution import InversionStatus
from invformer.numerics.norms import vector_norm
from tests.support import builders
from tests.support.problems import dense_jacobian, diagonal_norm, jacobian


def model_of_two_masks() -> CharTransformer:
    """A position bias in the first block, none in the second."""
    model = builders.contractive_model()
    model.stack.blocks[1].attention.branch.position = CausalMask(builders.SEQ_LEN)
    return model


EVERY_KIND = [
    model_of_two_masks,
    builders.contractive_model,
    partial(builders.contractive_model, bounded=True),
    partial(builders.contractive_model, certificate="causal", bounded=True),
    partial(builders.contractive_model, input_radius=2.0),
    builders.model_of_the_past,
    builders.scaled_model,
    partial(
        builders.scaled_model, certificate="token_max", strictly_causal=False, input_radius=2.0
    ),
]


def test_activation_norm_leaves_zero_mean_and_unit_variance_and_constant_channels_alone() -> None:
    x = 5 + 3 * torch.randn(16, 8, builders.WIDTH)
    x[..., 3] = 0
    layer = ActivationNorm(builders.WIDTH)
    layer.initialise(x)
    y = layer(x).flatten(0, 1)
    torch.testing.assert_close(y.mean(0), torch.zeros(builders.WIDTH), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.std(0), (torch.arange(builders.WIDTH) != 3).double())
    assert layer.log_scale[3].item() == 0
    assert not y[:, 3].any()


@pytest.mark.parametrize(
    "shape", [(1, builders.WIDTH), (5, builders.WIDTH), (2, 3, builders.WIDTH)]
)
def test_activation_norm_has_the_derivatives_of_its_formula(shape: tuple[int, ...]) -> None:
    layer = ActivationNorm(builders.WIDTH)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(shape, requires_grad=True)
    inputs = (x, layer.log_scale, layer.shift)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y.sin() * torch.linspace(1, 2, y.numel()).view(y.shape)).sum()

    ours = torch.autograd.grad(loss(layer(x)), inputs)
    formula = torch.autograd.grad(loss(x * layer.log_scale.exp() + layer.shift), inputs)
    torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-8)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), inputs)


@pytest.mark.parametrize("build", EVERY_KIND)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_whole_stack_is_undone_within_its_bound(build, dtype: torch.dtype) -> None:
    model, tokens = builders.trained_a_little(build()).to(dtype), builders.random_tokens(3, seed=5)
    certificate = enforce(model, dtype)
    with torch.no_grad():
        x = model.embedding(tokens)
        solution = model.stack.inverse(model.stack(x), certificate=certificate)
    error = vector_norm((solution.value - x).double(), "token_max")
    assert (error <= solution.error_bound).all()
    if certificate.kind == "global" and dtype == torch.float64:
        assert (solution.error_bound < model.embedding.decoding_margin()).all()
    assert torch.equal(model.embedding.nearest_tokens(solution.value), tokens)


@pytest.mark.parametrize("target", [0.0, -0.5, 1.0, 1.5, math.nan])
def test_a_target_that_is_no_contraction_is_refused_when_a_branch_is_made(target: float) -> None:
    with pytest.raises(ValueError, match=r"lipschitz_target must be in \(0, 1\), got"):
        ContractiveFeedForward(builders.WIDTH, 2 * builders.WIDTH, target)


@pytest.mark.parametrize(("tokens", "width", "bias"), [(1, 1, 1e2), (4, 2, 1e3), (8, 8, 1e4)])
@pytest.mark.parametrize("norm", ["token_max", "frobenius", "entry_max"])
def test_biases_that_cancel_break_no_bound(tokens: int, width: int, bias: float, norm: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        held = "entry_max" if norm == "entry_max" else "spectral"
        branch = ContractiveFeedForward(width, 2, 0.9, norm=held).eval()
        u, v = torch.randn(width, 1), torch.randn(1, width)
        with torch.no_grad():
            branch.w_in.weight.copy_(torch.cat([u, -u], 1))
            branch.w_out.weight.copy_(torch.cat([v, -v], 0))
            branch.b_in.fill_(bias)
            branch.log_sharpness.zero_()
            layer, x = InvertibleResidual(branch), torch.randn(64, tokens, width)
            found = layer.inverse(layer(x), norm=norm, throw=False)
        assert (vector_norm(found.value - x, norm) <= found.error_bound).all()
        assert (found.status != InversionStatus.NOT_CONTRACTIVE).all()


@pytest.mark.parametrize("build", EVERY_KIND)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("folded", [True, False])
def test_weights_together_are_those_of_each_layer(build, training: bool, folded: bool) -> None:
    model, x = builders.trained_a_little(build()), torch.randn(2, builders.SEQ_LEN, builders.WIDTH)
    with torch.set_grad_enabled(training):
        weights = model.stack.weights(folded)
        together, alone = model.stack(x, weights), x
        for block in model.stack.blocks:
            alone = block(alone, None, folded)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.stack(x, weights), together)
    if training:
        parameters = list(model.stack.parameters())
        found, expected = (
            torch.autograd.grad(y.sin().sum(), parameters) for y in (together, alone)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("build", EVERY_KIND)
def test_weights_are_values_that_later_steps_do_not_change(build) -> None:
    model, tokens = builders.trained_a_little(build()), builders.random_tokens(2)
    with torch.no_grad():
        weights, x = model.weights(), model.embedding(tokens)
        z, certificate = model.stack(x, weights), certify(model, weights=weights)
        for name, parameter in model.stack.named_parameters():
            if "position" not in name:
                parameter.mul_(1.3)
        assert torch.equal(model.stack(x, weights), z)
        assert not torch.allclose(model.stack(x), z)
        solution = model.stack.inverse(z, weights, certificate)
        torch.testing.assert_close(solution.value, x, rtol=1e-6, atol=1e-6)
        assert certify(model, weights=weights) == certificate


def test_a_branch_that_does_not_contract_is_not_inverted() -> None:
    layer = InvertibleResidual(L2Attention(builders.WIDTH, 3, CausalMask(builders.SEQ_LEN)))
    with pytest.raises(ValueError, match=r"no inverse: the bound of f is \d.* ≥ 1 in token_max"):
        layer.inverse(torch.zeros(1, builders.SEQ_LEN, builders.WIDTH))


def test_a_coupling_is_undone_keeps_volume_and_sees_no_later_token() -> None:
    model = builders.trained_a_little(builders.coupling())
    stack, x = model.stack, 3 * torch.randn(2, builders.SEQ_LEN, model.head.in_features)
    assert isinstance(stack, CouplingStack)
    torch.testing.assert_close(stack.inverse(stack(x)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(stack(stack.inverse(x)), x, rtol=0, atol=1e-12)
    jacobian = dense_jacobian(stack, x[0] / 3).detach()
    assert abs(torch.linalg.slogdet(jacobian)[1]) < 1e-9
    later = jacobian.view(*x[0].shape, *x[0].shape).abs().sum((1, 3)).triu(1)
    assert later.max() == 0


PAST = {"bounded": True, "certificate": "causal", "strictly_causal": True, "kernel": 3}
ANYWHERE = {"scaled": True, "input_radius": None}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"certificate": "causal"}, {"bounded": True}, {"bounded": True, "scaled": True}, PAST,
        ANYWHERE, PAST | ANYWHERE,
    ],
)  # fmt: skip
def test_no_branch_gains_more_than_its_bound_in_its_weighted_norm(options: dict) -> None:
    # Small enough to bend: tokens of these models have a length of about √12.
    in_a_ball = {"input_radius": 2.0} | options
    model = builders.trained_a_little(builders.contractive_model(**in_a_ball))
    if in_a_ball["input_radius"]:
        with pytest.raises(ValueError, match="entry_max"):
            certify(model, norm="entry_max")
    x = model.embedding(builders.random_tokens(1)).detach()
    bounds, frobenius, causal = (
        certify(model, norm, torch.float64, kind).per_branch
        for norm, kind in (("token_max", "global"), ("frobenius", "global"), (None, "causal"))
    )
    for name, layer in model.stack.layers():
        if isinstance(layer, InvertibleResidual):
            dense = jacobian(lambda t, layer=layer: layer(t) - t, x[0]).detach()
            if layer.scaling is not None:  # y = x + D⁻¹ f(D x + b) in ‖D x‖
                scale = layer.scaling.log_scale.exp()
                dense = scale[:, None, None] * dense / scale
            # ‖X‖_F ≤ 1 holds every token at 1, so a token's rows gain no more than in token_max.
            assert 0 < torch.linalg.matrix_norm(dense.flatten(2), 2).max() <= bounds[name]
            assert torch.linalg.matrix_norm(dense.flatten(2).flatten(0, 1), 2) <= frobenius[name]
            assert diagonal_norm(dense) <= causal[name]
        x = layer(x).detach()
