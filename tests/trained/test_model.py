"""A trained model as imported."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import invformer
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError, ConfigurationError, DataError
from invformer.trained.model import TrainedModel
from invformer.trained.states import read_states, write_states
from tests.support.builders import contractive_model, random_tokens
from tests.support.small_runs import tiny_run

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny trained run."""
    return tiny_run(tmp_path_factory.mktemp("trained"))


def test_a_loaded_model_generates_encodes_and_inverts(run: Path) -> None:
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


def test_a_text_of_more_windows_comes_back_from_states_without_some_channels(run: Path) -> None:
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


def test_the_unknown_symbol_is_never_proven_but_what_follows_it_is(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = invformer.load(run)
    found = model.invert(model.encode("1 ï 2"))
    assert "1 of 5 characters are not in the vocabulary" in caplog.text
    assert found.text == "1 \ufffd 2"
    assert found.proven == (True, True, False, True, True)


def test_wrong_states_texts_and_paths_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
