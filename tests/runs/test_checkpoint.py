"""A checkpoint is whole under its name or not there, and nothing in a hostile one has an effect."""

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from invformer.errors import CheckpointError, NonFiniteError
from invformer.nn.transformer import CharTransformer
from invformer.runs import checkpoint as directory
from invformer.runs.checkpoint import (
    FILES,
    MANIFEST,
    PARTIAL,
    Checkpoint,
    keep_only,
    name_for,
    newest_checkpoint,
    open_checkpoint,
    read_checkpoint,
    saved_in,
    sweep,
    write_directory,
)
from invformer.trained.opening import restored
from tests.runs.hostile import ATTACKS, Attack, flipped, seal
from tests.support.saved_runs import NO_STATE, Saved, write_checkpoint
from tests.support.small_runs import newest

METADATA: dict[str, Any] = {"config": {}, "vocabulary": {}, "data_sha256": "0"}
WANTED = {"w": torch.empty(100, dtype=torch.float64)}
INTERVALS = 3
pytestmark = pytest.mark.usefixtures("single_precision")


def save(folder: Path, step: int) -> str:
    """One save as training makes it: write, then prune to the last two."""
    name, before = name_for(folder, step), [path.name for path in saved_in(folder)]
    weights = {"w": torch.full((100,), float(step), dtype=torch.float64)}
    state = {**NO_STATE, "callbacks": {"x": torch.full((1000,), step)}}
    write_checkpoint(folder / name, {**METADATA, "step": step}, weights, state)
    keep_only(folder, {name, *before[:1]})
    return name


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


class Killer:
    """Counts what touches the disk in this process, and kills it at the call of one number."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
            setattr(os, name, self.counted(getattr(os, name)))
        directory.write_new = self.write_in_pieces

    def counted(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    def write_in_pieces(self, path: Path, content: bytes) -> None:
        middle = len(content) // 2
        with path.open("xb", buffering=0) as file:
            for piece in (content[:1], content[1:middle], content[middle:]):
                self.counted(file.write)(piece)
            os.fsync(file.fileno())


def killed_while_saving(folder: Path, at: int) -> tuple[bool, int]:
    """Save a few times in a child that dies at a call; whether it did, and how many it finished."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Killer(at)
            for step in range(1, INTERVALS + 1):
                save(folder, step)
                os.write(writer, b".")
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        return os.WIFSIGNALED(status), len(file.read())


def test_a_process_killed_anywhere_in_a_save_leaves_the_newest_or_the_one_before(
    tmp_path, monkeypatch
) -> None:
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev:
        monkeypatch.setenv("TMPDIR", str(memory))  # where a rename to the run would not be atomic
    killed = 0
    while True:
        folder = tmp_path / f"{killed}" / "checkpoints"
        folder.parent.mkdir()
        died, finished = killed_while_saving(folder, at=killed + 1)
        if not died:
            break
        killed += 1
        if finished:
            found = newest(folder.parent)
            assert finished <= found.step <= finished + 1
            assert found.read_weights(WANTED)["w"].eq(found.step).all()
            assert found.read_state()["callbacks"]["x"].eq(found.step).all()
        else:
            assert len(saved_in(folder)) <= 1
        sweep(folder)
        assert not list(folder.glob(PARTIAL + "*"))
        save(folder, 9)
        assert newest(folder.parent).step == 9
    assert finished == INTERVALS
    assert killed >= 40


def test_files_reach_the_disk_before_names_and_manifest_last(folder, monkeypatch) -> None:
    order = []
    write, sync, rename = directory.write_new, directory.sync_folder, os.rename
    monkeypatch.setattr(directory, "write_new", lambda p, c: (write(p, c), order.append(p.name)))
    monkeypatch.setattr(directory, "sync_folder", lambda p: (sync(p), order.append(p.name)))
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), order.append("rename")))
    write_directory(folder / "step-00000001", {"a": b"1", "b": b"2"})
    partial = PARTIAL + "step-00000001"
    assert order == ["a", "b", MANIFEST, partial, "rename", "checkpoints"]


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_a_state_that_is_not_finite_is_never_written(folder, where: str) -> None:
    bad, good = torch.tensor([1.0, float("nan")]), torch.ones(2)
    weights = {"w": bad if where == "weights" else good}
    state = {**NO_STATE, "optimizer_states": [{"m": bad if where == "optimizer" else good}]}
    with pytest.raises(NonFiniteError, match=r"step 1: (w|optimizer_states/0/m) is not finite"):
        write_checkpoint(folder / "step-00000001", {**METADATA, "step": 1}, weights, state)
    assert not folder.exists()


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a flipped bit": flipped,
    "cut short": lambda content: content[:-2],
    "a byte more": lambda content: content + b"\0",
    "empty": lambda _: b"",
    "removed": lambda _: None,
}


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_any_file_is_found_and_the_one_before_is_taken(
    folder, name: str, damage: str
) -> None:
    save(folder, 1)
    path = folder / save(folder, 2) / name
    content = DAMAGES[damage](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    found, (refused,) = newest_checkpoint(folder)
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in refused


def test_when_none_verifies_nothing_is_started_over(folder) -> None:
    (folder / save(folder, 1) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no other checkpoint in .* is whole"):
        newest_checkpoint(folder)


def test_hidden_files_of_whoever_looks_at_folders_are_no_part_of_a_checkpoint(folder) -> None:
    path = folder / save(folder, 1)
    for name in (".DS_Store", "._model.json", ".nfs0000000001"):
        (path / name).touch()
    assert newest(folder.parent).verified().step == 1


def test_a_pointer_of_git_lfs_is_called_one(folder) -> None:
    path = folder / save(folder, 1)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (path / "weights.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is a pointer of Git LFS"):
        newest(folder.parent).verified()


def test_a_step_saved_twice_keeps_both_and_the_second_is_the_newer(folder) -> None:
    names = [save(folder, 5) for _ in range(12)]
    assert names[:3] == ["step-00000005", "step-00000005-1", "step-00000005-2"]
    assert newest(folder.parent).path.name == names[-1] == "step-00000005-11"
    assert [path.name for path in saved_in(folder)] == names[:-3:-1]


@pytest.mark.parametrize(
    ("stand", "name"),
    [
        (".", "run/checkpoints/step-00000004"),
        ("run/checkpoints/step-00000004", "."),
        ("run/checkpoints", "../checkpoints/./step-00000004"),
        (".", "elsewhere/checkpoints/link"),
    ],
)
def test_results_go_to_the_runs_folder(tmp_path, monkeypatch, stand: str, name: str) -> None:
    (tmp_path / "run").mkdir()
    saved = tmp_path / "run" / "checkpoints" / save(tmp_path / "run" / "checkpoints", 4)
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere" / "checkpoints" / "link").symlink_to(saved)
    monkeypatch.chdir(tmp_path / stand)
    evaluation = open_checkpoint(Path(name)).evaluation
    assert evaluation.name == "evaluation.json"
    assert evaluation.parent.samefile(tmp_path / "run")


MEGABYTES = 400  # that all attempts together may take; the smallest bomb here has a gigabyte


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A good checkpoint, as a run would have left it."""
    torch.set_default_dtype(torch.float32)
    return Saved(tmp_path_factory.mktemp("good")).save()


@pytest.fixture
def victim(good, tmp_path) -> Path:
    """A copy of it in a run folder, for an attack."""
    path = tmp_path / "run" / "checkpoints" / good.name
    shutil.copytree(good, path)
    return path


def load_everything(path: str) -> tuple[Checkpoint, CharTransformer]:
    """What evaluating does first: the model, and a look at the state beside it."""
    checkpoint = read_checkpoint(path)
    return checkpoint, restored(checkpoint)


@pytest.mark.parametrize("attack", [pytest.param(a, id=name) for name, a in ATTACKS.items()])
def test_a_hostile_checkpoint_is_refused_in_one_line(
    attack: Attack, victim, tmp_path, monkeypatch
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


def test_mutations_are_refused_or_harmless(good, tmp_path) -> None:
    """With a new manifest a changed float is another valid checkpoint, which no check can tell.

    Without one, a mutation is either refused or has changed white space of the manifest alone.
    """
    wanted_checkpoint, wanted = load_everything(str(good))
    contents = {name: (good / name).read_bytes() for name in (*FILES, MANIFEST)}
    folder, refused = tmp_path / "copy", 0
    shutil.copytree(good, folder)
    for seed in range(50):
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
            if not sealed or name == MANIFEST:
                torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=0)
                assert checkpoint.metadata == wanted_checkpoint.metadata, seed
            else:
                assert all(w.isfinite().all() for w in model.state_dict().values()), seed
                assert checkpoint.configuration().model.d_model == 16, seed
        for kept in {name, MANIFEST}:
            (folder / kept).write_bytes(contents[kept])
    assert refused > 30
