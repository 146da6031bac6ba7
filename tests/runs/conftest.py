"""Runs that many tests of their room begin with."""

import shutil
from pathlib import Path

import pytest
import torch

from invformer.runs.checkpoint import MODEL
from tests.runs.hostile import edit_json
from tests.runs.resuming import train


def trained(folder: Path, until: int | None = None) -> Path:
    """A folder with a text and the run on it; in float32, as the application runs."""
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("invformer.training.fit.plot_run", lambda _, path, *rest: path.touch())
        train(folder, until=until)
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A folder with a text and a run of six steps that was never interrupted."""
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def half_way(tmp_path_factory) -> Path:
    """The same, stopped after four steps."""
    return trained(tmp_path_factory.mktemp("half"), until=4)


@pytest.fixture
def stopped_run(half_way, tmp_path) -> Path:
    """A copy of the run that was stopped, on the very text."""
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        edit_json(path, MODEL, lambda m: m["config"]["data"].update(path=f"{tmp_path}/squares.txt"))
    return tmp_path
