"""Run folders: made once, continued or refused, never overwritten."""

import os
from pathlib import Path
from typing import Any

import pytest

from invformer.config.load import from_dict, to_yaml
from invformer.errors import CheckpointError, StorageError
from invformer.runs.resume import resume_point
from invformer.runs.run_directory import RunDirectory, open_run

CONFIG = {"model": {"d_model": 96}, "optim": {"lr": 1e-3}, "run": {"resume": True}}
OTHER = {**CONFIG, "optim": {"lr": 2e-3}}


def begin(root: Path, config: dict = CONFIG) -> None:
    """A run that has done a step."""
    run = open_run(root, "a", "x", True)
    run.config.write_text(to_yaml(from_dict(config)))
    run.metrics.write_text('{"step": 0}\n')


def continue_run(root: Path, config: dict, resume: bool = True) -> Path:
    """Its folder, which nothing refuses to continue in; no step was saved."""
    run = open_run(root, "a", "x", resume)
    assert resume_point(run, from_dict(config), {}) is None
    return run.path


def test_unnamed_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, second = (open_run(tmp_path, None, "l2-ptb", True) for _ in range(2))
    assert first.path != second.path
    assert first.path.name.startswith("l2-ptb-")


def test_a_run_is_continued_with_its_own_configuration_if_that_is_allowed(tmp_path: Path) -> None:
    begin(tmp_path)
    continue_run(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.001, now 0\.002"):
        continue_run(tmp_path, OTHER)
    continue_run(tmp_path, {**CONFIG, "run": {"resume": True, "debug": True}})
    with pytest.raises(CheckpointError, match=r"exists: choose another run\.name"):
        continue_run(tmp_path, CONFIG, resume=False)


def test_a_run_begun_before_an_option_existed_continues_with_its_default(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "a" / "config.yaml").write_text("model: {d_model: 96}\noptim: {lr: 0.001}")
    default, other = ({**CONFIG, "optim": {"lr": 1e-3, "ema_decay": d}} for d in (None, 0.9))
    continue_run(tmp_path, default)
    with pytest.raises(CheckpointError, match=r"optim\.ema_decay was None, now 0\.9"):
        continue_run(tmp_path, other)


def test_the_command_that_continues_a_run_of_torchrun_is_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RunDirectory(Path("a")).command == "python train.py config=a"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    again = "torchrun --nnodes=1 --nproc-per-node=2 train.py config=a"
    assert RunDirectory(Path("a")).command == again


def test_a_file_with_the_name_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(StorageError, match=r"/a: cannot create a run folder \(File exists\)"):
        open_run(tmp_path, "a", "x", True)


@pytest.mark.parametrize("config", [None, "mod: 1", '{"mod', "[" * 1_000, os.mkfifo])
def test_a_foreign_folder_is_refused(tmp_path: Path, config: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("precious")
    if callable(config):
        config(tmp_path / "a" / "config.yaml")
    elif config is not None:
        (tmp_path / "a" / "config.yaml").write_text(config)
    with pytest.raises(CheckpointError, match="holds no run"):
        open_run(tmp_path, "a", "x", True)
    assert (tmp_path / "a" / "thesis.tex").read_text() == "precious"
    assert not (tmp_path / "a" / ".lock").exists()


@pytest.mark.parametrize("left", [[], [".partial-config.yaml-7"], [".lock"]])
def test_a_folder_whose_making_was_interrupted_is_made_again(
    tmp_path: Path, left: list[str]
) -> None:
    (tmp_path / "a").mkdir()
    for name in left:
        (tmp_path / "a" / name).write_text('{"model": {"d_mod')
    continue_run(tmp_path, CONFIG, resume=False)
    begin(tmp_path)
    continue_run(tmp_path, CONFIG)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_did_nothing_gives_its_name_to_another_configuration(
    tmp_path: Path, resume: bool
) -> None:
    begin(tmp_path)
    for name in ("checkpoints", "wandb"):
        (tmp_path / "a" / name).mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    continue_run(tmp_path, OTHER, resume)


@pytest.mark.parametrize(
    "kept", ["metrics.jsonl", "checkpoints/step-00000001", "checkpoints/.partial-x", "notes.txt"]
)
def test_a_folder_with_anything_in_it_keeps_its_configuration(tmp_path: Path, kept: str) -> None:
    begin(tmp_path)
    path = tmp_path / "a"
    (path / "metrics.jsonl").write_text("")
    (path / kept).parent.mkdir(exist_ok=True)
    (path / kept).write_text('{"step": 0}')
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.001, now 0\.002"):
        continue_run(tmp_path, OTHER)


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(StorageError, match="cannot create a run folder"):
        open_run(tmp_path / "root", None, "x", True)
