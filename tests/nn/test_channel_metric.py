"""Branches that contract in metrics of their own."""

import copy
import math
import pickle

import pytest
import torch

from invformer.assemble.model import build_model
from invformer.config.schema import ModelConfig
from invformer.errors import NonFiniteError
from invformer.evaluation.lipschitz import measured_branches
from invformer.nn import certify, enforce, frozen_weights
from invformer.nn.branch import affine
from invformer.nn.channel_metric import INITIAL_LOUDNESS, ChangeOfMetric, ChannelMetric
from invformer.numerics.linear_map import dense_jacobian
from invformer.numerics.norms import vector_norm
from tests.nn.builders import (
    SEQ_LEN,
    VOCAB,
    WIDTH,
    contractive_model,
    model_in_metrics,
    random_tokens,
    trained_a_little,
)

MODELS = [
    {},
    {"kernel": 3},
    {"certificate": "token_max", "bounded": False, "strictly_causal": False},
    {"certificate": "token_max", "strictly_causal": False, "input_radius": 2.0},
]


def random_metric() -> ChannelMetric:
    metric = ChannelMetric(WIDTH, torch.arange(3))
    for parameter in metric.parameters():
        torch.nn.init.normal_(parameter)
    return metric


@pytest.mark.parametrize("options", MODELS)
def test_a_block_is_its_formula(options: dict) -> None:
    model = trained_a_little(model_in_metrics(**options))
    x = model.embedding(random_tokens(2))
    for block in model.stack.blocks:
        expected = x
        for metric, layer in (
            (block.attention_metric, block.attention),
            (block.feed_forward_metric, block.feed_forward),
        ):
            scale = metric.log_scale.exp()
            expected = expected + layer.added(expected * scale + metric.shift) / scale
        x = block(x)
        torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", MODELS)
def test_what_a_branch_adds_to_the_stream_contracts_in_its_metric(options: dict) -> None:
    model = trained_a_little(model_in_metrics(**options))
    certificate = certify(model, dtype=torch.float64)
    x = model.embedding(random_tokens(1)).detach()
    block = model.stack.blocks[0]
    metric, layer = block.attention_metric, block.attention
    scale = metric.log_scale.exp().detach()

    def added(x: torch.Tensor) -> torch.Tensor:
        return layer.added(x * scale + metric.shift.detach()) / scale

    jacobian = dense_jacobian(added, x[0]).view(SEQ_LEN, WIDTH, SEQ_LEN, WIDTH)
    weighted = jacobian * scale[:, None, None] / scale
    if certificate.kind == "causal":  # of single tokens
        blocks = weighted.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    else:  # ‖X‖_F ≤ 1 holds every token at 1, so a token gains no more than in token_max
        blocks = weighted.flatten(2)
    gain = torch.linalg.matrix_norm(blocks, 2).max().item()
    assert 0 < gain <= certificate.per_branch["block_00/attention"] <= 0.5


def test_in_plain_coordinates_a_branch_may_be_far_from_a_contraction() -> None:
    model = trained_a_little(model_in_metrics(certificate="token_max", strictly_causal=False))
    x = model.embedding(random_tokens(1)).detach()
    block = model.stack.blocks[0]
    plain = dense_jacobian(block, x[0]) - torch.eye(SEQ_LEN * WIDTH)
    assert torch.linalg.matrix_norm(plain, 2).item() > 1
    certificate = enforce(model, torch.float64)
    assert certificate.holds
    assert certificate.in_metrics
    assert not certify(contractive_model()).in_metrics


def test_at_first_a_branch_reads_what_is_there_and_is_loud_where_it_should_be() -> None:
    torch.manual_seed(0)
    model = model_in_metrics()
    x = model.embedding(random_tokens(8)).detach()
    block = model.stack.blocks[0]
    metric, branch = block.attention_metric, block.attention.branch
    loud = torch.zeros(WIDTH, dtype=torch.bool)
    loud[metric.loud] = True
    read = metric(x).flatten(0, 1)
    torch.testing.assert_close(read.mean(0), torch.zeros(WIDTH), rtol=0, atol=1e-12)
    assert (read.std(0) <= 1 + 1e-12).all()
    assert torch.equal(metric.log_scale == 0, ~loud & (x.flatten(0, 1).std(0) <= 1))
    written = (branch(metric(x)) / metric.log_scale.exp()).flatten(0, 1).std(0)
    # Asked while it is nearly deaf in those channels; what it then reads of them is little.
    torch.testing.assert_close(
        written[loud], torch.full((3,), INITIAL_LOUDNESS), rtol=0.2, atol=0.0
    )
    assert written[~loud].max() < 0.5 * INITIAL_LOUDNESS


def test_changes_of_metric_compose_and_are_undone() -> None:
    first, second, x = random_metric(), random_metric(), torch.randn(3, WIDTH)
    enter, between, leave = (
        ChangeOfMetric(None, first),
        ChangeOfMetric(first, second),
        ChangeOfMetric(second, None),
    )
    torch.testing.assert_close(enter(x), first(x))
    torch.testing.assert_close(between(enter(x)), second(x))
    torch.testing.assert_close(leave(second(x)), x)
    for change in (enter, between, leave):
        torch.testing.assert_close(change.inverse(change(x)), x)
        assert not list(change.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", MODELS)
def test_the_text_comes_back_within_the_bound(options: dict, dtype: torch.dtype) -> None:
    model, tokens = trained_a_little(model_in_metrics(**options)).to(dtype), random_tokens(3)
    certificate = enforce(model, dtype)
    with torch.no_grad():
        x = model.embedding(tokens)
        z = model.stack(x)
        solution = model.stack.inverse(z, certificate)
        other = model.stack.preimage_bound(x, z, certificate)
    error = vector_norm((solution.value - x).double(), "token_max")
    assert (error <= solution.error_bound).all()
    assert torch.equal(model.embedding.nearest_tokens(solution.value), tokens)
    if dtype == torch.float64:
        assert (other < model.embedding.decoding_margin()).all()


@pytest.mark.parametrize("options", MODELS)
def test_with_gradients_a_block_is_the_same_function_folded_into_its_weights(options: dict) -> None:
    model = trained_a_little(model_in_metrics(**options))
    x = model.embedding(random_tokens(2)).detach().requires_grad_()
    parameters = [x, *model.stack.parameters()]

    def by_layers(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _, layer in block.layers():
            x = layer(x)
        return x

    folded, plain = x, x
    for block in model.stack.blocks:
        folded, plain = block(folded), by_layers(block, plain)
    torch.testing.assert_close(folded, plain, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert torch.equal(model.stack(x), plain)
    ours = torch.autograd.grad(folded.sin().sum(), parameters)
    expected = torch.autograd.grad(plain.sin().sum(), parameters)
    for found, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_every_gradient_is_that_of_the_formula() -> None:
    model = model_in_metrics().train()
    tokens = random_tokens(2)
    model(tokens).logsumexp(-1).sum().backward()
    step, metric = 1e-6, model.stack.blocks[0].feed_forward_metric
    for parameter in (metric.log_scale, metric.shift):
        assert parameter.grad is not None
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                parameter[5] += sign * step
                values.append(model(tokens).logsumexp(-1).sum().item())
                parameter[5] -= sign * step
        assert parameter.grad[5].item() == pytest.approx(
            (values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("bias", [True, False])
def test_an_affine_map_of_centred_tokens_has_the_derivatives_of_its_formula(bias: bool) -> None:
    x, w = torch.randn(2, 5, 3).requires_grad_(), torch.randn(3, 4).requires_grad_()
    b, centre = torch.randn(4).requires_grad_(), torch.randn(3).requires_grad_()
    inputs = (x, w, centre, b) if bias else (x, w, centre)
    towards = torch.randn(2, 5, 4)

    def derivatives(y: torch.Tensor, create_graph: bool) -> list[torch.Tensor]:
        return list(torch.autograd.grad(y, inputs, towards, create_graph=create_graph))

    def mapped() -> torch.Tensor:
        return affine(x, w, b if bias else None, centre)

    def formula() -> torch.Tensor:
        return (x + centre) @ w + (b if bias else 0)

    torch.testing.assert_close(mapped(), formula())
    torch.testing.assert_close(derivatives(mapped(), False), derivatives(formula(), False))
    second = [
        torch.autograd.grad(sum(d.square().sum() for d in derivatives(f(), True)), (x, w, centre))
        for f in (mapped, formula)
    ]
    torch.testing.assert_close(*second)
    gradients = [torch.func.grad(lambda c: affine(x, w, None, c).sum())(centre)]
    gradients.append(torch.func.grad(lambda c: ((x + c) @ w).sum())(centre))
    torch.testing.assert_close(*gradients)


def test_frozen_weights_hold_where_gradients_are_wanted_too() -> None:
    model = trained_a_little(model_in_metrics())
    x = model.embedding(random_tokens(2)).detach().requires_grad_()
    with frozen_weights(model):
        expected = model.stack(x)
        with torch.no_grad():
            for name, parameter in model.stack.named_parameters():
                if name.endswith("weight"):
                    parameter += 0.1 * torch.randn_like(parameter)
        y = model.stack(x)
        y.square().sum().backward()
    assert torch.equal(y, expected)
    assert x.grad is not None
    assert not torch.equal(model.stack(x), expected)


def test_changes_of_metric_are_held_while_weights_are_frozen_and_only_then() -> None:
    model, tokens = trained_a_little(model_in_metrics()), random_tokens(2)
    block = model.stack.blocks[0]
    with torch.no_grad():
        expected = model(tokens)
        with frozen_weights(model):
            assert torch.equal(model(tokens), expected)
            block.attention_metric.log_scale += 0.1
            assert torch.equal(model(tokens), expected)
            copied = copy.deepcopy(block.enter)
            assert copied._frozen is None
        assert not torch.equal(model(tokens), expected)


def test_metrics_are_saved_once_and_copied_with_their_block() -> None:
    model = trained_a_little(model_in_metrics())
    names = [name for name in model.state_dict() if "blocks.0" in name and "metric" in name]
    assert names == [
        f"stack.blocks.0.{branch}_metric.{part}"
        for branch in ("attention", "feed_forward")
        for part in ("log_scale", "shift")
    ]
    tokens = random_tokens(2)
    expected = model(tokens)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(tokens), expected)
        with torch.no_grad():
            copied.stack.blocks[0].attention_metric.log_scale += 0.1
        assert not torch.equal(copied(tokens), expected)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_named(value: float) -> None:
    model = model_in_metrics()
    with torch.no_grad():
        model.stack.blocks[1].feed_forward_metric.shift[2] = value
    with pytest.raises(NonFiniteError, match="block_01/between"):
        enforce(model, torch.float64)


@pytest.mark.parametrize("options", MODELS)
def test_estimates_stay_below_local_bounds_and_those_below_bounds(options: dict) -> None:
    model = trained_a_little(model_in_metrics(**options))
    for branches in measured_branches(model, random_tokens(2), 60).values():
        assert all(0 < row["estimate"] <= row["bound"] for row in branches.values())


@pytest.mark.parametrize("options", MODELS)
def test_characters_come_one_by_one_as_they_come_at_once(options: dict) -> None:
    model, tokens = trained_a_little(model_in_metrics(**options)), random_tokens(2)
    with torch.no_grad(), frozen_weights(model):
        past: dict = {}
        one_by_one = [model.extend(tokens[:, i : i + 1], past) for i in range(SEQ_LEN)]
        torch.testing.assert_close(torch.cat(one_by_one, 1), model(tokens))


def test_branches_are_loud_one_after_the_other_from_the_first_free_channel_on() -> None:
    config = ModelConfig(d_model=12, num_heads=3, num_layers=2)
    stack = build_model(config, VOCAB, SEQ_LEN).stack
    loud = [
        metric.loud.tolist()
        for block in stack.blocks
        for metric in (block.attention_metric, block.feed_forward_metric)
    ]
    assert loud == [[4, 5, 6], [7, 8, 9], [10, 11, 0], [1, 2, 3]]
