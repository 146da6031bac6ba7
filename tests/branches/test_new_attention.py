"""What the attention of position_attention.py gets without another line; to copy with it."""

from typing import Any

import pytest
import torch

from invformer.assemble import model as assemble
from invformer.branches.jacobian import StackedBranches
from invformer.config.schema import ATTENTIONS, ModelConfig
from invformer.errors import ConfigurationError
from invformer.evaluation.lipschitz import measured_branches
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn import CharTransformer, NoCertificateError, certify
from invformer.proofs.enclosed_network import Network
from invformer.proofs.prefix_margins import prefix_margins
from invformer.weights.position_bias import RelativePositionBias
from tests.branches.position_attention import PositionAttention
from tests.support.builders import SEQ_LEN, VOCAB, random_tokens, trained_a_little
from tests.support.problems import dense_jacobian


class Untold(PositionAttention):
    """A subclass, which does not say that the bound is proven for it as well."""


def build_attention(config: ModelConfig, seq_len: int, channels: slice | None) -> PositionAttention:
    position = RelativePositionBias(config.num_heads, seq_len)
    return PositionAttention(config.d_model, position, config.lipschitz_target)


@pytest.fixture
def model(monkeypatch) -> CharTransformer:
    """Two blocks with the attention, made known to the program and trained for two steps."""
    monkeypatch.setitem(ATTENTIONS, "position", ("token_max",))
    monkeypatch.setattr(assemble, "build_attention", build_attention)
    config = ModelConfig(name="position", d_model=12, num_heads=3, num_layers=2)
    return trained_a_little(assemble.build_model(config, VOCAB, SEQ_LEN), steps=2).double()


def test_the_new_attention_trains_and_is_certified_at_its_target(model) -> None:
    certificate = certify(model)
    assert certificate.holds
    assert 0.49 < certificate.per_branch["block_01/attention"] <= 0.5


def test_no_token_sees_a_later_one(model) -> None:
    tokens = random_tokens(1)
    torch.testing.assert_close(model(tokens)[:, :3], model(tokens[:, :3]), rtol=0, atol=1e-12)


def test_the_new_attention_is_inverted_and_its_error_is_bounded(model) -> None:
    x = model.embedding(random_tokens(3)).detach()
    solution = model.stack.inverse(model.stack(x))
    error = (solution.value - x).norm(dim=-1).amax(-1)
    assert (error <= solution.error_bound).all()
    assert (solution.error_bound < 1e-6).all()


def test_a_dense_jacobian_of_the_new_attention_is_below_its_bound(model) -> None:
    branch: Any = model.stack.blocks[0].attention.branch
    jacobian = dense_jacobian(branch, torch.randn(5, 12, dtype=torch.float64))
    blocks = jacobian.unflatten(0, (5, 12)).unflatten(2, (5, 12)).detach()
    gain = torch.linalg.matrix_norm(blocks.transpose(1, 2), 2).sum(-1).max().item()
    assert gain <= branch.lipschitz_bound("token_max") * (1 + 1e-12)


def test_an_evaluation_leaves_out_norms_without_a_theorem(model) -> None:
    assert measured_branches(model, random_tokens(1), 3).keys() == {"token_max"}


@pytest.mark.parametrize("measured", ["token_max", "diagonal_block"])
@pytest.mark.parametrize("radius", [None, 1.5])
def test_estimates_follow_those_of_automatic_derivatives_and_stay_below_local_bounds(
    model, measured: Any, radius: float | None, monkeypatch
) -> None:
    for block in model.stack.blocks:
        block.attention.input_radius = radius
    probe, bounds = LipschitzProbe(model, random_tokens(2), measured), certify(model).per_branch
    local = dict(zip(probe.names, probe.local_bounds().tolist(), strict=True))
    ours = [probe.values() for _ in range(3)]
    monkeypatch.setattr(PositionAttention, "stacked", StackedBranches)
    automatic = LipschitzProbe(model, random_tokens(2), measured)
    torch.testing.assert_close(ours, [automatic.values() for _ in range(3)])
    for name, estimate in zip(probe.names, ours[-1].tolist(), strict=True):
        if "attention" in name:
            assert 0 < estimate <= local[name] <= bounds[name]
            if radius is None:  # the example's local bound is exact
                assert estimate > 0.9 * local[name]


@torch.no_grad()
def test_characters_are_proven_through_the_new_attention(model) -> None:
    tokens = random_tokens(1)
    states, places = model.stack(model.embedding(tokens))[0], torch.arange(SEQ_LEN)
    for accurate in (True, False):
        network = Network(model, SEQ_LEN, accurate)
        found, past = network(tokens[0], places, None)
        again, _ = network(tokens[0], places, past)  # each symbol behind those before it
        for state in (found.single(), again.single()):
            assert ((state.middle - states).abs() <= state.radius + 1e-14).all()
            assert state.radius.max() < 1e-12
    assert prefix_margins(model, tokens, states[None], unknown=0).proven.any()


def test_a_subclass_has_no_certificate_until_it_says_so(model) -> None:
    model.stack.blocks[0].attention.branch.__class__ = Untold
    with pytest.raises(NoCertificateError, match="no proof is known for Untold"):
        certify(model)


@pytest.mark.parametrize(("key", "value"), [("certificate", "causal"), ("d_head", 4)])
def test_options_of_others_are_refused(key: str, value: Any, model) -> None:
    with pytest.raises(ConfigurationError, match=f"model.{key}: .*position"):
        ModelConfig(name="position", **{key: value})
