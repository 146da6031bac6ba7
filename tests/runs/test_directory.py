"""A checkpoint is whole under its name or not there, whenever the process that writes it dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from invformer.errors import CheckpointError, NonFiniteError, StorageError
from invformer.runs import checkpoint_directory as directory
from invformer.runs.checkpoint import (
    LIMITS,
    Checkpoint,
    newest_checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from invformer.runs.checkpoint_directory import (
    MANIFEST,
    PARTIAL,
    keep_only,
    name_for,
    saved_in,
    sweep,
    write_directory,
)
from invformer.runs.tensors import Spec
from tests.saved_runs import NO_STATE

METADATA: dict[str, Any] = {"config": {}, "vocabulary": {}, "data_sha256": "0"}
WANTED = {"w": Spec(torch.float64, (100,))}
INTERVALS = 3


def save(folder: Path, step: int) -> str:
    """One save as training makes it: write, then prune to the last two."""
    name, before = name_for(folder, step), [path.name for path in saved_in(folder)]
    weights = {"w": torch.full((100,), float(step))}
    state = {**NO_STATE, "callbacks": {"x": torch.full((1000,), step)}}
    write_checkpoint(folder / name, {**METADATA, "step": step}, weights, state)
    keep_only(folder, {name, *before[:1]})
    return name


def newest(folder: Path) -> Checkpoint:
    found, _ = newest_checkpoint(folder)
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


class Killer:
    """Counts what touches the disk in this process, and kills it at the call of one number."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
            setattr(os, name, self.counted(getattr(os, name)))
        directory.write_file = self.write_in_pieces

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            found = newest(folder)
            assert finished <= found.step <= finished + 1
            assert found.read_weights(WANTED)["w"].eq(found.step).all()
            assert found.read_state()["callbacks"]["x"].eq(found.step).all()
        else:
            assert len(saved_in(folder)) <= 1
        sweep(folder)
        assert not list(folder.glob(PARTIAL + "*"))
        save(folder, 9)
        assert newest(folder).step == 9
    assert finished == INTERVALS
    assert killed >= 40


def test_files_reach_the_disk_before_their_name_and_the_manifest_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    write, sync, rename = directory.write_file, directory.sync_folder, os.rename
    monkeypatch.setattr(directory, "write_file", lambda p, c: (write(p, c), order.append(p.name)))
    monkeypatch.setattr(directory, "sync_folder", lambda p: (sync(p), order.append(p.name)))
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), order.append("rename")))
    write_directory(folder / "step-00000001", {"a": b"1", "b": b"2"})
    partial = PARTIAL + "step-00000001"
    parent = folder.parent.name
    assert order == [parent, "a", "b", MANIFEST, partial, "rename", "checkpoints"]


def test_the_temporary_lies_beside_the_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = []
    monkeypatch.setattr(os, "rename", lambda *paths: parents.extend(p.parent for p in paths))
    write_directory(folder / "step-00000001", {"a": b"1"})
    assert parents == [folder, folder]


def test_a_full_disk_leaves_nothing_of_the_new_and_all_of_the_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        save(folder, 2)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert newest(folder).step == 1


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_a_state_that_is_not_finite_is_never_written(folder: Path, where: str) -> None:
    bad, good = torch.tensor([1.0, float("nan")]), torch.ones(2)
    weights = {"w": bad if where == "weights" else good}
    state = {**NO_STATE, "optimizer_states": [{"m": bad if where == "optimizer" else good}]}
    with pytest.raises(NonFiniteError, match=r"step 1: (w|optimizer_states/0/m) is not finite"):
        write_checkpoint(folder / "step-00000001", {**METADATA, "step": 1}, weights, state)
    assert not folder.exists()


@pytest.mark.parametrize("name", [*LIMITS, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "empty", "remove"])
def test_any_damage_to_any_file_is_found_and_the_one_before_is_taken(
    folder: Path, name: str, damage: str
) -> None:
    save(folder, 1)
    path = folder / save(folder, 2) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    match damage:
        case "flip":
            path.write_bytes(content)
        case "truncate":
            path.write_bytes(path.read_bytes()[:-2])
        case "append":
            path.write_bytes(path.read_bytes() + b"\0")
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
    found, refused = newest_checkpoint(folder)
    assert found is not None
    assert found.step == 1
    assert len(refused) == 1
    assert "step-00000002" in refused[0]
    with pytest.raises(CheckpointError):
        open_checkpoint(path.parent).manifest.verify()


def test_when_none_verifies_nothing_is_started_over(folder: Path) -> None:
    (folder / save(folder, 1) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no other checkpoint in .* is whole"):
        newest_checkpoint(folder)


def test_a_step_saved_twice_keeps_both_and_the_second_is_the_newer(folder: Path) -> None:
    names = [save(folder, 5) for _ in range(12)]
    assert names[:3] == ["step-00000005", "step-00000005-1", "step-00000005-2"]
    assert newest(folder).path.name == names[-1] == "step-00000005-11"
    assert [path.name for path in saved_in(folder)] == names[:-3:-1]


def test_steps_are_ordered_as_numbers(folder: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(folder, step)
    assert newest(folder).step == 100_000_000


def test_links_and_foreign_names_are_no_checkpoints(folder: Path, tmp_path: Path) -> None:
    save(folder, 1)
    (tmp_path / "elsewhere").mkdir()
    (folder / "step-00000009").symlink_to(tmp_path / "elsewhere")
    (folder / "step-9").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert newest(folder).step == 1
    keep_only(folder, set())
    assert {path.name for path in folder.iterdir()} == {"step-00000009", "step-9", "notes.txt"}


# --- which folder the results go to --------------------------------------------------------------


@pytest.mark.parametrize(
    ("stand", "name"),
    [
        (".", "run/checkpoints/step-00000004"),
        ("run", "checkpoints/step-00000004"),
        ("run/checkpoints", "step-00000004"),
        ("run/checkpoints/step-00000004", "."),
        ("run/checkpoints", "../checkpoints/./step-00000004"),
        (".", "link"),
        ("elsewhere/checkpoints", "link"),
    ],
)
def test_results_go_to_the_runs_folder_however_the_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand: str, name: str
) -> None:
    (tmp_path / "run").mkdir()
    saved = tmp_path / "run" / "checkpoints" / save(tmp_path / "run" / "checkpoints", 4)
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "elsewhere" / "checkpoints"):
        (folder / "link").symlink_to(saved)
    monkeypatch.chdir(tmp_path / stand)
    evaluation = open_checkpoint(Path(name)).evaluation
    assert evaluation.name == "evaluation.json"
    assert evaluation.parent.samefile(tmp_path / "run")


def test_results_of_a_checkpoint_outside_a_run_lie_beside_it_under_its_name(
    tmp_path: Path,
) -> None:
    saved = tmp_path / save(tmp_path, 4)
    (tmp_path / "link").symlink_to(saved)
    expected = tmp_path.resolve() / "step-00000004.evaluation.json"
    for name in (saved, tmp_path / "link"):
        assert open_checkpoint(name).evaluation == expected


def test_results_go_to_the_runs_folder_if_its_checkpoints_lie_on_another_disk(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    save(tmp_path / "run" / "checkpoints", 4)
    assert newest(tmp_path / "run" / "checkpoints").evaluation == tmp_path / "run/evaluation.json"
