"""Whatever somebody puts into a checkpoint: nothing runs, nothing wrong is loaded, code 4."""

import random
import resource
import shutil
from pathlib import Path

import pytest
import torch

from invformer.assemble.model import build_model
from invformer.assemble.saved_model import load_model, trained_configuration
from invformer.config import from_dict
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import Checkpoint
from invformer.runs.checkpoint_directory import MANIFEST
from tests.runs.hostile import ATTACKS, FILES, Attack, seal
from tests.saved_runs import save_run

MODEL = {"d_model": 12, "num_heads": 3, "num_layers": 2, "d_embedding": 4}
CONFIG = from_dict({"model": MODEL, "data": {"seq_len": 10}})
MEGABYTES = 400  # that all attempts together may take; the smallest bomb here has a gigabyte


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint, as a run would have left it."""
    torch.manual_seed(1)
    vocabulary = Vocabulary.from_text("abcdefgh")
    model = build_model(CONFIG.model, vocabulary.size, 10).float()
    return save_run(tmp_path_factory.mktemp("good"), CONFIG, vocabulary, model)


@pytest.fixture
def victim(good: Path, tmp_path: Path) -> Path:
    """A copy of it in a run folder, for an attack."""
    path = tmp_path / "run" / "checkpoints" / good.name
    shutil.copytree(good, path)
    return path


def load_everything(path: str) -> tuple[Checkpoint, CharTransformer]:
    """What evaluating does first: the model, and a look at the state beside it."""
    checkpoint = read_checkpoint(path)
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    return checkpoint, load_model(checkpoint, trained_configuration(checkpoint), vocabulary)


def test_the_good_one_is_read(victim: Path) -> None:
    for path in (victim, victim.parent.parent):
        checkpoint, model = load_everything(str(path))
        assert checkpoint.step == 3
        assert model.head.out_features == 9


@pytest.mark.parametrize("attack", [pytest.param(a, id=name) for name, a in ATTACKS.items()])
def test_a_hostile_checkpoint_is_refused_in_one_line(
    attack: Attack, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for switch in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(switch, "1")  # neither means anything here
    canary = tmp_path / "executed"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = attack(victim, canary)
    with pytest.raises(CheckpointError) as error:
        load_everything(path or str(victim))
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert not canary.exists()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < MEGABYTES * 1024


# --- Mutations -----------------------------------------------------------------------------------


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four small damages."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data)) if data else 0
        match chance.randrange(5):
            case 0 if data:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 9))
            case 3 if data:
                other = chance.randrange(len(data))
                data[place], data[other] = data[other], data[place]
            case _:
                del data[place : place + chance.randint(1, 9)]
    return bytes(data)


def same_weights(one: CharTransformer, other: CharTransformer) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def try_mutations(good: Path, folder: Path, seeds: range) -> tuple[int, int]:
    """How many mutations were refused and how many were not; each in a copy of the checkpoint.

    Without a new manifest a mutation is either refused or has changed nothing that is read (white
    space of the manifest): weights, state and metadata are the same. With a new manifest a changed
    float is another valid checkpoint, which no check can tell; then what is loaded must be valid.
    """
    wanted_checkpoint, wanted = load_everything(str(good))
    contents = {name: (good / name).read_bytes() for name in (*FILES, MANIFEST)}
    shutil.copytree(good, folder)
    refused = loaded = 0
    for seed in seeds:
        chance = random.Random(seed)
        name, sealed = chance.choice([*FILES, MANIFEST]), chance.random() < 0.5
        (folder / name).write_bytes(mutated(contents[name], chance))
        if sealed and name != MANIFEST:
            seal(folder)
        try:
            checkpoint, model = load_everything(str(folder))
        except CheckpointError:
            refused += 1
        else:
            loaded += 1
            if not sealed or name == MANIFEST:
                assert same_weights(model, wanted), seed
                assert checkpoint.metadata == wanted_checkpoint.metadata, seed
            else:
                assert all(w.isfinite().all() for w in model.state_dict().values()), seed
                assert trained_configuration(checkpoint).model.d_model == 12, seed
        for restored in {name, MANIFEST}:
            (folder / restored).write_bytes(contents[restored])
    return refused, loaded


def test_mutations_are_refused_or_harmless(good: Path, tmp_path: Path) -> None:
    refused, loaded = try_mutations(good, tmp_path / "copy", range(200))
    assert refused + loaded == 200
    assert refused > 120


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_mutations_are_refused_or_harmless(good: Path, tmp_path: Path) -> None:
    refused, loaded = try_mutations(good, tmp_path / "copy", range(1000, 11_000))
    assert refused + loaded == 10_000
    assert refused > 6_000
