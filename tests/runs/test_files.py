"""What a run writes stays in its folder, and only one process writes there."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from invformer.errors import CheckpointError, InvformerError, StorageError
from invformer.report.plots import plot_run
from invformer.runs.files import (
    LOCK,
    open_kept,
    read_regular,
    replace_file,
    require_lock,
    write_json,
)
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.run_directory import open_run
from invformer.runs.saving import Checkpoints
from invformer.runs.wandb_logger import open_wandb
from tests.support.small_runs import write_rows

WRITERS: dict[str, Callable[[Path], Any]] = {
    "config.yaml": lambda run: replace_file(run / "config.yaml", "a: 1"),
    "metrics.jsonl": lambda run: write_rows(run / "metrics.jsonl", {0: {"x": 1.0}}),
    "metrics.damaged": lambda run: with_damage(run / "metrics.jsonl"),
    "summary.png": lambda run: plot_run({}, run / "summary.png", "", None),
    "evaluation.json": lambda run: write_json({"bpc": 1.0}, run / "evaluation.json"),
    LOCK: lambda run: open_run(run.parent, run.name, "x", True),
}


def with_damage(path: Path) -> None:
    path.write_text("damaged\n")
    JsonLinesLogger(path)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("stem", ["{}", ".partial-{}-{pid}"])
def test_nothing_is_written_through_a_link_in_a_run_folder(
    tmp_path: Path, name: str, stem: str
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("precious")
    (run / stem.format(name, pid=os.getpid())).symlink_to(outside)
    with suppress(InvformerError):
        WRITERS[name](run)
    assert outside.read_text() == "precious"


def test_wandb_writes_nothing_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb").symlink_to(tmp_path)
    assert open_wandb(tmp_path, mode="offline", asked={}, defaults={}) is None
    assert "wandb: a link, which is not followed; going without W&B" in capsys.readouterr().err


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("open_file", [open_kept, read_regular])
def test_only_regular_files_are_opened(
    tmp_path: Path, make: Callable[[Path], None], open_file: Callable[[Path], Any]
) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"regular|directory"):
        open_file(tmp_path / "a")


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(StorageError, match=r"config\.yaml: cannot be written"):
        replace_file(tmp_path / "config.yaml", "a: 1")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


HOLDER = """
import pathlib, sys, time
from invformer.runs.run_directory import open_run
open_run(pathlib.Path(sys.argv[1]), "a", "x", True)
print("open", flush=True)
time.sleep(600)
"""


def test_a_run_is_refused_while_another_process_is_at_it_and_free_once_that_was_killed(
    tmp_path: Path,
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    with pytest.raises(CheckpointError, match=f"in use by another process.*{other.pid}"):
        open_run(tmp_path, "a", "x", True)
    other.kill()
    other.communicate()
    write_rows(tmp_path / "a" / "metrics.jsonl", {0: {"x": 1.0}})
    replace_file(tmp_path / "a" / "config.yaml", "model: {d_model: 8}")
    assert open_run(tmp_path, "a", "x", True)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_whose_lock_was_deleted_writes_nothing_more(tmp_path: Path, again: bool) -> None:
    path = open_run(tmp_path, "a", "x", True).path
    write_rows(path / "metrics.jsonl", {0: {"x": 1.0}})
    require_lock(path)
    (path / LOCK).unlink()
    if again:
        (path / LOCK).write_text("another process")
    trainer: Any = SimpleNamespace(save_checkpoint=lambda *_, **__: pytest.fail("saved"))
    for write in (
        lambda: write_rows(path / "metrics.jsonl", {1: {"x": 1.0}}, first_step=1),
        lambda: Checkpoints(path / "checkpoints").save(trainer, "step-00000001", set()),
        lambda: write_json({}, path / "certificate.json"),
    ):
        with pytest.raises(CheckpointError, match="was deleted or replaced while this run was on"):
            write()
    assert (path / "metrics.jsonl").read_text().count("\n") == 1
    moved = path.rename(tmp_path / "b")
    with pytest.raises(CheckpointError, match="was renamed or deleted while this run was on"):
        write_json({}, path / "certificate.json")
    assert not path.exists()
    assert not (moved / "certificate.json").exists()
