"""Settings every test shares: float64, one thread, no network, no W&B server."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch  # not at the top: the process that hands tests to others has no use for it

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_words_about_waits(monkeypatch) -> None:
    """However slow the machine is, what a program prints is the same."""
    monkeypatch.setattr("invformer.processes.bar.SILENT", 1e6)


@pytest.fixture(autouse=True)
def _double_precision_and_a_fixed_seed() -> Iterator[None]:
    """float64 unless a test says otherwise, the same random numbers in any order of tests."""
    import torch

    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(previous)


@pytest.fixture
def single_precision() -> None:
    """The precision that the application runs in."""
    import torch

    torch.set_default_dtype(torch.float32)


@pytest.fixture
def without_plots(monkeypatch) -> None:
    """Runs leave an empty summary.png: drawing it takes longer than their training."""
    monkeypatch.setattr("invformer.training.fit.plot_run", lambda _, path, *rest: path.touch())


@pytest.fixture
def folder(tmp_path, single_precision, without_plots) -> Path:
    """A folder with the text of small runs."""
    from tests.support.small_runs import write_text

    write_text(tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch) -> Callable[..., int]:
    """Run a command in this process; returns its exit code."""
    from invformer import commands

    monkeypatch.setattr(commands, "stop_on_signals", lambda: None)  # this process keeps its own

    def command(name: str, *words: str) -> int:
        with pytest.raises(SystemExit) as end:
            commands.run(*commands.COMMANDS[name], words)
        return int(end.value.code or 0)

    return command


@pytest.fixture(autouse=True)
def _shapes_may_be_wrong_on_purpose(request) -> Iterator[None]:
    """Under --check-shapes, let the code under test refuse what a ``wrong_shapes`` test passes.

    Checks are Python that a compiler cannot trace: what ``compiles`` is skipped under them.
    """
    if request.config.getoption("--check-shapes") and request.node.get_closest_marker("compiles"):
        pytest.skip("not traceable with shape checks")
    on_purpose = request.node.get_closest_marker("wrong_shapes") is not None
    jaxtyping.config.update("jaxtyping_disable", on_purpose)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check-shapes",
        action="store_true",
        help="check every annotated tensor shape while the tests run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check-shapes"):
        from tests.support import shapes

        # Before the first test module is imported: the hook decorates modules as they load.
        jaxtyping.install_import_hook(
            "invformer", f"{shapes.__name__}.{shapes.shapes_only.__name__}"
        )
