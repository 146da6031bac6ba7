"""A trained model as imported, its states in files and damaged, its weights in few bits."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import invformer
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError, ConfigurationError, DataError
from invformer.runs.packed import packed, unpacked
from invformer.trained.export import quantised, rounded
from invformer.trained.model import TrainedModel
from invformer.trained.states import perturb, read_states, write_states
from tests.support.builders import contractive_model, random_tokens, scaled_model, trained_a_little
from tests.support.small_runs import tiny_run

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A tiny trained run."""
    return tiny_run(tmp_path_factory.mktemp("trained"))


def test_a_loaded_model_generates_encodes_and_inverts(run) -> None:
    model = invformer.load(run)
    text = "3 times 3 is 9; 4 times"
    z = model.encode(text)
    assert z.shape == (len(text), 24)
    found = model.invert(z)
    assert found.text == text
    assert all(found.proven)
    assert found.num_steps > 0
    assert 0 < found.residual < 1e-4
    assert 0 < found.error_bound < 0.1
    assert repr(found).startswith(f"RecoveredText('{text}', {len(text)} of {len(text)} characters")
    characters = list(model.stream(text, 30, seed=2))
    assert [len(c) for c in characters] == [1] * 30
    assert model.generate(text, 30, seed=2) == text + "".join(characters)
    assert model.certificate is not None
    assert model.certificate.holds
    assert re.fullmatch(
        r"Certificate\(4 Lipschitz bounds ≤ 0\.\d{6} in weighted token_max "
        r"\(worst block_0\d/\w+\), target 0\.5: holds\)",
        repr(model.certificate),
    )
    assert "step 8" in repr(model)


def test_weights_that_were_trained_on_are_certified_and_inverted_anew(run) -> None:
    model, fresh, text = invformer.load(run), invformer.load(run), "3 times 3 is 9"
    before = model.certificate
    assert model.invert(model.encode(text).numpy()).text == text
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    fresh.network.load_state_dict(model.network.state_dict())
    assert model.certificate == fresh.certificate != before
    assert model.certificate is model.certificate
    z = model.encode(text)
    assert model.invert(z) == fresh.invert(z)
    assert model.invert(z).text == text


def test_a_text_of_more_windows_comes_back_from_states_without_some_channels(run) -> None:
    model = invformer.load(run)
    text = "3 times 3 is 9; " * 6
    z = model.encode(text)
    within = torch.full_like(z[:1], 1e-4)
    z[:, :8], within[:, :8] = 0, torch.inf
    assert len(text) > model.network.seq_len
    found = model.invert(z, entries_within=within)
    assert found.text == text
    assert all(found.proven)


def test_a_forward_pass_that_cancels_is_assumed_to_round_more() -> None:
    network = contractive_model().requires_grad_(False)
    network.embedding.token.weight += 1e3  # ActivationNorm takes it out
    network.initialise(random_tokens(8))
    model = TrainedModel(network.float(), Vocabulary(tuple("0123456789A")), None, {})
    z = network.stack(network.embedding(random_tokens(200)))
    exact = copy.deepcopy(network).double()
    rounded = (z - exact.stack(exact.embedding(random_tokens(200)))).abs().max()
    assert 2**-16 * z[0].abs().max() < rounded < model.assumed_rounding(z[0]) < 100 * rounded


def test_the_unknown_symbol_is_never_proven_but_what_follows_it_is(run, caplog) -> None:
    model = invformer.load(run)
    found = model.invert(model.encode("1 ï 2"))
    assert "1 of 5 characters are not in the vocabulary" in caplog.text
    assert found.text == "1 \ufffd 2"
    assert found.proven == (True, True, False, True, True)


def test_wrong_states_texts_and_paths_are_refused(run, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    model = invformer.load(run)
    with pytest.raises(DataError, match=r"states have the shape \(3, 5\), not \(tokens, 24\)"):
        model.invert(torch.zeros(3, 5))
    write_states(torch.full((3, 24), torch.nan), "states.safetensors")
    with pytest.raises(DataError, match="some of its numbers are not finite"):
        read_states("states.safetensors")
    z = torch.randn(3, 24)
    for held, complaint in (
        ({"a": z, "b": -z}, "call one of its 2 tensors states"),
        ({}, "call one of its 0 tensors states"),
        ({"z": torch.stack([z, z])}, r"the shape \(tokens, width\), not \(2, 3, 24\)"),
        ({"z": z.long()}, "numbers of 16, 32 or 64 bits, not torch.int64"),
        ({"z": z.to(torch.float8_e4m3fn)}, "not torch.float8_e4m3fn"),
    ):
        save_file(held, "states.safetensors")
        with pytest.raises(DataError, match=complaint):
            read_states("states.safetensors")
    with pytest.raises(ConfigurationError, match="empty"):
        model.encode("")
    with pytest.raises(CheckpointError, match="no folder here, and the Hub cannot be reached"):
        invformer.load("me/nothing")
    for path in (f"{run.name}/nothing", "checkpoints/nothing"):
        with pytest.raises(CheckpointError, match="does not exist: name a run folder"):
            invformer.load(path)


def test_states_are_rounded_to_the_bits_asked_for() -> None:
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert perturb(z, 0.0, 2, 0)[0].unique().numel() == 4
    assert torch.equal(perturb(z, 0.0, None, 0)[0], z)
    assert torch.equal(perturb(torch.ones(2, 2), 0.0, 2, 0)[0], torch.ones(2, 2))
    noise = perturb(z, 0.5, None, 0)[0] - z
    assert torch.allclose(noise.norm(dim=-1), 0.5 * z.square().sum(-1).mean().sqrt())


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_has_no_direction_of_an_embedding_that_was_drawn_by_the_same_seed(seed: int) -> None:
    torch.manual_seed(seed)
    embedding = torch.nn.Embedding(20, 64).weight.detach()
    noise = perturb(torch.ones(20, 64), 1.0, None, seed)[0] - 1
    assert torch.cosine_similarity(noise, embedding).abs().max() < 0.7


def test_levels_beyond_half_precision_move_its_states_by_at_most_half_a_level() -> None:
    z = torch.randn(50, 8, dtype=torch.float16)
    level = (z.max() - z.min()).item() / (2**16 - 1)
    assert (perturb(z, 0.0, 16, 0)[0] - z).abs().max() <= 0.51 * level


@pytest.mark.parametrize(
    ("noise", "bits"), [(0.0, 3), (0.5, None), (0.5, 3), (1e6, None), (0.0, None)]
)
def test_it_is_known_how_far_damaged_states_may_be_off(noise: float, bits: int | None) -> None:
    z = torch.randn(50, 8)
    changed, known = perturb(z, noise, bits, 0)
    away = changed - z
    sizes = {"entries_within": away.abs().max(), "states_within": away.norm(dim=-1).max()}
    names = {(0.0, 3): ["entries_within"], (0.0, None): []}
    assert list(known) == names.get((noise, bits), ["states_within"])
    for name, bound in known.items():
        assert 0.6 * bound < sizes[name] < bound


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_channel_has_a_few_evenly_spaced_levels_and_a_small_error(bits: int) -> None:
    weight = torch.randn(3, 40, 5)
    found = rounded(weight, bits, input_dim=-2).value()
    for column in found.transpose(-2, -1).flatten(0, 1):
        steps = column.unique().diff()
        assert len(column.unique()) <= 2**bits - 1
        assert torch.allclose(steps / steps.min(), (steps / steps.min()).round(), atol=1e-3)
    assert (found - weight).square().mean() < 4.0 ** (2 - bits) * weight.square().mean()


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = torch.cat([torch.zeros(1, 6), torch.randn(1, 6)])
    assert torch.equal(rounded(weight, 4, input_dim=-1).value()[0], torch.zeros(6))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_stored_matrices_come_back_to_the_bit_and_are_small(bits: int) -> None:
    model, matrices = quantised(trained_a_little(scaled_model()).float(), bits)
    weights, stored = model.state_dict(), packed(matrices)
    stored |= {name: weight for name, weight in weights.items() if name not in matrices}
    for name, weight in unpacked(stored, weights, bits).items():
        assert torch.equal(weight, weights[name])
    for name, matrix in matrices.items():
        size = stored[name + ".integers"].numel()
        assert matrix.integers.numel() * bits <= 8 * size < matrix.integers.numel() * bits + 8


def test_more_bits_than_an_integer_holds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bits: 9 is not in \[2, 8\]"):
        quantised(scaled_model(), 9)
