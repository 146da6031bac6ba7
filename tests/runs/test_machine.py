"""What this machine cannot do is refused before anything is made."""

import subprocess
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from invformer import commands
from invformer.config.load import load_config
from invformer.errors import ConfigurationError
from invformer.processes import launcher
from invformer.processes.ranks import usable_cores
from invformer.runs import machine
from invformer.runs.machine import refuse_missing_requirements
from invformer.training.build import build_run


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
