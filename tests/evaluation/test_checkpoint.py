"""Which checkpoint of a run folder is evaluated, and what is said if it is not the best."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from invformer.errors import CheckpointError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.runs.checkpoint import MANIFEST, STATE_TENSORS, WEIGHTS, write_checkpoint
from tests.saved_runs import NO_STATE

BEST, NEWEST = "step-00000004", "step-00000006"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of three checkpoints, the second of which is the best."""
    for step in (2, 4, 6):
        metadata = {"step": step, "config": {}, "vocabulary": {}, "data_sha256": "", "best": BEST}
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        write_checkpoint(path, metadata, {"w": torch.ones(9)}, NO_STATE)
    return tmp_path


def damage(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)


def found(run: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    with caplog.at_level(logging.WARNING):
        name = read_checkpoint(str(run)).path.name
    return name, [record.getMessage() for record in caplog.records]


def test_the_best_is_taken_without_a_word(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert found(run, caplog) == (BEST, [])


@pytest.mark.parametrize("name", [WEIGHTS, STATE_TENSORS, MANIFEST])
def test_a_damaged_best_is_passed_over_with_a_warning(
    run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / "checkpoints" / BEST, name)
    taken, (warning,) = found(run, caplog)
    assert taken == NEWEST
    assert str(run / "checkpoints" / BEST) in warning
    assert warning.endswith(f"; taking {NEWEST}, the newest, not the best")


@pytest.mark.parametrize("how", ["deleted", "a link"])
def test_a_best_that_is_gone_is_missed_in_a_warning(
    run: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    best = run / "checkpoints" / BEST
    if how == "deleted":
        shutil.rmtree(best)
    else:
        best.rename(run / "elsewhere")
        best.symlink_to(run / "elsewhere")
    assert found(run, caplog) == (
        NEWEST,
        [
            f"{best}: the best checkpoint is not there any more; taking {NEWEST}, the newest, "
            "not the best"
        ],
    )


def test_a_damaged_newest_does_not_hide_the_best(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / "checkpoints" / NEWEST, WEIGHTS)
    taken, (warning,) = found(run, caplog)
    assert taken == BEST
    assert NEWEST in warning
    assert warning.endswith(f"; taking {BEST}")


def test_a_damaged_checkpoint_that_was_named_itself_is_refused(run: Path) -> None:
    best = run / "checkpoints" / BEST
    damage(best, MANIFEST)
    with pytest.raises(CheckpointError, match=BEST):
        read_checkpoint(str(best))
