"""Run folders: made where the machine can run, continued or refused, written by one process."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from invformer import commands
from invformer.config.load import from_dict, load_config, to_yaml
from invformer.errors import CheckpointError, ConfigurationError, InvformerError, StorageError
from invformer.processes import launcher
from invformer.processes.ranks import usable_cores
from invformer.report.plots import plot_run
from invformer.runs import machine
from invformer.runs.files import LOCK, replace_file, require_lock, write_json
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.machine import refuse_missing_requirements
from invformer.runs.resume import resume_point
from invformer.runs.run_directory import RunDirectory, open_run
from invformer.runs.saving import Checkpoints
from invformer.runs.wandb_logger import open_wandb
from invformer.training.build import build_run
from tests.support.small_runs import write_rows

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


def test_unnamed_runs_never_share_a_folder(tmp_path) -> None:
    first, second = (open_run(tmp_path, None, "l2-ptb", True) for _ in range(2))
    assert first.path != second.path
    assert first.path.name.startswith("l2-ptb-")


def test_a_run_is_continued_with_its_own_configuration_if_that_is_allowed(tmp_path) -> None:
    begin(tmp_path)
    continue_run(tmp_path, CONFIG)
    continue_run(tmp_path, {**CONFIG, "run": {"resume": True, "debug": True}})
    with pytest.raises(CheckpointError, match=r"exists: choose another run\.name"):
        continue_run(tmp_path, CONFIG, resume=False)


def test_the_command_that_continues_a_run_of_torchrun_is_torchrun(monkeypatch) -> None:
    assert RunDirectory(Path("a")).command == "python train.py config=a"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    again = "torchrun --nnodes=1 --nproc-per-node=2 train.py config=a"
    assert RunDirectory(Path("a")).command == again


@pytest.mark.parametrize("config", [None, "mod: 1", '{"mod', "[" * 1_000, os.mkfifo])
def test_a_foreign_folder_is_refused(tmp_path, config: Any) -> None:
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
def test_a_folder_whose_making_was_interrupted_is_made_again(tmp_path, left: list[str]) -> None:
    (tmp_path / "a").mkdir()
    for name in left:
        (tmp_path / "a" / name).write_text('{"model": {"d_mod')
    continue_run(tmp_path, CONFIG, resume=False)
    begin(tmp_path)
    continue_run(tmp_path, CONFIG)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_did_nothing_gives_its_name_away(tmp_path, resume: bool) -> None:
    begin(tmp_path)
    for name in ("checkpoints", "wandb"):
        (tmp_path / "a" / name).mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    continue_run(tmp_path, OTHER, resume)


@pytest.mark.parametrize(
    "kept", ["metrics.jsonl", "checkpoints/step-00000001", "checkpoints/.partial-x", "notes.txt"]
)
def test_a_folder_with_anything_in_it_keeps_its_configuration(tmp_path, kept: str) -> None:
    begin(tmp_path)
    path = tmp_path / "a"
    (path / "metrics.jsonl").write_text("")
    (path / kept).parent.mkdir(exist_ok=True)
    (path / kept).write_text('{"step": 0}')
    with pytest.raises(CheckpointError, match=r"optim\.lr was 0\.001, now 0\.002"):
        continue_run(tmp_path, OTHER)


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(StorageError, match="cannot create a run folder"):
        open_run(tmp_path / "root", None, "x", True)


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
def test_nothing_is_written_through_a_link_in_a_run_folder(tmp_path, name: str, stem: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("precious")
    (run / stem.format(name, pid=os.getpid())).symlink_to(outside)
    with suppress(InvformerError):
        WRITERS[name](run)
    assert outside.read_text() == "precious"


def test_wandb_writes_nothing_through_a_link(tmp_path, capsys) -> None:
    (tmp_path / "wandb").symlink_to(tmp_path)
    assert open_wandb(tmp_path, mode="offline", asked={}, defaults={}) is None
    assert "wandb: a link, which is not followed; going without W&B" in capsys.readouterr().err


HOLDER = """
import pathlib, sys, time
from invformer.runs.run_directory import open_run
open_run(pathlib.Path(sys.argv[1]), "a", "x", True)
print("open", flush=True)
time.sleep(600)
"""


def test_a_run_is_refused_while_another_process_is_at_it_and_free_once_that_was_killed(
    tmp_path,
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
def test_a_run_whose_lock_was_deleted_writes_nothing_more(tmp_path, again: bool) -> None:
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


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(StorageError, match=r"config\.yaml: cannot be written"):
        replace_file(tmp_path / "config.yaml", "a: 1")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "auto"])
def test_devices_that_are_not_there_are_a_configuration_error(
    accelerator: str, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(accelerator == "auto"))
    config = load_config([f"trainer.accelerator={accelerator}", "trainer.devices=2"])
    with pytest.raises(ConfigurationError, match=r"trainer\.devices: 2 of kind"):
        refuse_missing_requirements(config)
    refuse_missing_requirements(load_config(["trainer.accelerator=cpu", "trainer.devices=2"]))


def test_more_processes_than_cores_are_refused_before_one_is_started(monkeypatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    started: list[int] = []
    monkeypatch.setattr(launcher, "launch", started.append)
    words = ["trainer.accelerator=cpu", "data.batch_size=20"]
    commands.train(load_config([*words, "trainer.devices=4"]))
    with pytest.raises(ConfigurationError, match=r"trainer\.devices: 5 of kind cpu .* 4 are here"):
        commands.train(load_config([*words, "trainer.devices=5"]))
    assert started == [4]


@pytest.fixture
def refuse(tmp_path) -> Callable[..., None]:
    """A run that these words ask for is refused, and has no folder."""

    def refuse(message: str, *words: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            build_run(load_config([f"run.root={tmp_path / 'runs'}", *words]))
        assert not (tmp_path / "runs").exists()

    return refuse


def test_an_attention_that_cannot_be_trained_there_is_refused_before_there_is_a_folder(
    refuse, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kernel, gpu = "model.attention_kernel", "trainer.accelerator=auto"
    refuse(rf"{kernel}: .*CPU.*; pick auto", gpu, f"{kernel}=native")
    refuse(r"no triton here .*NVIDIA.*; pick auto", "trainer.accelerator=cpu", f"{kernel}=triton")
    for fine in ("auto", "math", "sdpa"):
        refuse_missing_requirements(load_config([gpu, f"{kernel}={fine}"]))


def test_compiling_without_a_compiler_is_refused_before_there_is_a_folder(
    refuse, monkeypatch
) -> None:
    message = "InvalidCxxCompiler: No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1"
    monkeypatch.setattr(torch, "compile", lambda f: Mock(side_effect=RuntimeError(message)))
    refuse(r"trainer\.compile: .*found\)", "trainer.accelerator=cpu", "trainer.compile=true")


def test_a_logger_that_is_not_installed_is_refused_before_there_is_a_folder(
    refuse, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    refuse(r"logger\.name: .*pip install", "logger.name=[csv,tensorboard]")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000"}, 6),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "1000 100000"}, 1),
    ],
)
def test_threads_of_ranks_share_the_cores_that_the_container_may_use(
    files: dict[str, str], cores: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == cores


def test_an_installed_package_takes_no_commit_of_a_repository_around(tmp_path, monkeypatch) -> None:
    person = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*person, "commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (folder := tmp_path / "venv" / "invformer" / "runs").mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(folder / "machine.py"))
    assert machine.commit() is None
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "invformer" / "runs" / "machine.py"))
    assert machine.commit()
