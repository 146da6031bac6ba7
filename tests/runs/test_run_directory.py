"""Run folders: made once, continued or refused, never overwritten."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from invformer.errors import CheckpointError, StorageError
from invformer.runs.run_directory import open_run

CONFIG = {"model": {"d_model": 96}, "optim": {"lr": 1e-3}, "run": {"resume": True}}


def begin(root: Path, config: dict = CONFIG) -> None:
    """A run that has done a step."""
    (open_run(root, "a", "x", config, True).path / "metrics.jsonl").write_text('{"step": 0}\n')


def test_unnamed_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, second = (open_run(tmp_path, None, "l2-ptb", CONFIG, True) for _ in range(2))
    assert first.path != second.path
    assert first.path.name.startswith("l2-ptb-")


def test_the_same_name_and_configuration_continue_the_run(tmp_path: Path) -> None:
    begin(tmp_path)
    assert open_run(tmp_path, "a", "x", CONFIG, True).resumed


def test_another_configuration_is_refused_with_the_differing_key(tmp_path: Path) -> None:
    begin(tmp_path)
    other = {**CONFIG, "optim": {"lr": 2e-3}}
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.001, now 0\.002"):
        open_run(tmp_path, "a", "x", other, True)


def test_what_changes_no_number_may_change(tmp_path: Path) -> None:
    begin(tmp_path)
    assert open_run(tmp_path, "a", "x", {**CONFIG, "run": {"resume": True, "debug": True}}, True)


def test_a_run_begun_before_an_option_existed_continues_with_its_default(tmp_path: Path) -> None:
    begin(tmp_path)
    default, other = ({**CONFIG, "optim": {"lr": 1e-3, "ema_decay": d}} for d in (None, 0.9))
    assert open_run(tmp_path, "a", "x", default, True).resumed
    with pytest.raises(CheckpointError, match=r"optim\.ema_decay was None, now 0\.9"):
        open_run(tmp_path, "a", "x", other, True)


def test_an_existing_run_is_not_touched_when_resuming_is_switched_off(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(CheckpointError, match=r"exists: choose another run\.name"):
        open_run(tmp_path, "a", "x", CONFIG, False)


@pytest.mark.parametrize("config", [None, "{}", "[]", '{"mod', "[" * 100_000, os.mkfifo])
def test_a_foreign_folder_is_refused(tmp_path: Path, config: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("precious")
    if callable(config):
        config(tmp_path / "a" / "config.json")
    elif config is not None:
        (tmp_path / "a" / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="holds no run"):
        open_run(tmp_path, "a", "x", CONFIG, True)
    assert (tmp_path / "a" / "thesis.tex").read_text() == "precious"
    assert not (tmp_path / "a" / ".lock").exists()


@pytest.mark.parametrize("left", [[], [".partial-config.json-7"], [".lock"]])
def test_a_folder_whose_making_was_interrupted_is_made_again(
    tmp_path: Path, left: list[str]
) -> None:
    (tmp_path / "a").mkdir()
    for name in left:
        (tmp_path / "a" / name).write_text('{"model": {"d_mod')
    assert not open_run(tmp_path, "a", "x", CONFIG, True).resumed
    begin(tmp_path)
    assert open_run(tmp_path, "a", "x", CONFIG, True).resumed


OTHER = {**CONFIG, "optim": {"lr": 2e-3}}


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_did_nothing_gives_its_name_to_another_configuration(
    tmp_path: Path, resume: bool
) -> None:
    run = open_run(tmp_path, "a", "x", CONFIG, True)
    run.checkpoints.mkdir()
    run.config.write_text("model: {}")
    run.metrics.write_text("")
    assert not open_run(tmp_path, "a", "x", OTHER, resume).resumed
    assert json.loads((run.path / "config.json").read_text()) == OTHER


@pytest.mark.parametrize(
    "kept", ["metrics.jsonl", "checkpoints/step-00000001", "checkpoints/.partial-x", "notes.txt"]
)
def test_a_folder_with_anything_in_it_keeps_its_configuration(tmp_path: Path, kept: str) -> None:
    path = open_run(tmp_path, "a", "x", CONFIG, True).path
    (path / kept).parent.mkdir(exist_ok=True)
    (path / kept).write_text('{"step": 0}')
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.001, now 0\.002"):
        open_run(tmp_path, "a", "x", OTHER, True)
    assert json.loads((path / "config.json").read_text()) == CONFIG


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(StorageError, match="cannot create a run folder"):
        open_run(tmp_path / "root", None, "x", CONFIG, True)
