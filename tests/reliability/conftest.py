"""One zygote, one text and one uninterrupted run of each model for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kills import undisturbed
from tests.support.small_runs import write_text
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """The folder that holds the runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    return folder


@pytest.fixture(scope="session")
def zygote(root) -> Iterator[Zygote]:
    mother = Zygote(root)
    yield mother
    mother.close()


@pytest.fixture(scope="session")
def durations(zygote, root) -> dict[str, float]:
    return undisturbed(zygote, root)


@pytest.fixture(scope="session")
def uninterrupted(root, durations) -> dict[str, Path]:
    """The run of each model that nobody disturbed."""
    return {name: root / name for name in durations}
