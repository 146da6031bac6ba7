"""One zygote, one text and one uninterrupted run of each model for all tests of this folder."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills import FAST, MODELS
from tests.small_runs import options, write_text
from tests.zygote import Zygote


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    return folder


@pytest.fixture(scope="session")
def zygote(root: Path) -> Iterator[Zygote]:
    mother = Zygote(root)
    yield mother
    mother.close()


@pytest.fixture(scope="session")
def durations(zygote: Zygote, root: Path) -> dict[str, float]:
    """Seconds that the run of each model takes when nobody disturbs it."""
    seconds = {}
    for name, model in MODELS.items():
        began = time.monotonic()
        ended = zygote.run(options(root, name, model=model), before=FAST)
        seconds[name] = time.monotonic() - began
        assert ended.code == 0, ended.stderr
    return seconds


@pytest.fixture(scope="session")
def uninterrupted(root: Path, durations: dict[str, float]) -> dict[str, Path]:
    """The run of each model that nobody disturbed."""
    return {name: root / name for name in durations}
