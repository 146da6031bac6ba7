"""Runs of six steps that are stopped and continued, and what is left of them."""

import signal
from pathlib import Path

from invformer.runs.checkpoint import STATE, STATE_TENSORS, WEIGHTS, Checkpoint
from invformer.runs.run_log import read_rows
from invformer.training.fit import fit
from tests.support import small_runs
from tests.support.small_runs import StopAt, built, write_text

SHORT = ("trainer.max_steps=6", "trainer.val_every=2", "monitor.inversion=false")


def train(folder: Path, *more: str, until: int | None = None, stop_at: int | None = None) -> None:
    """Train on the text in a folder, which is written there if it has none."""
    if not (folder / "squares.txt").exists():
        write_text(folder)
    stop = [] if stop_at is None else [StopAt(stop_at, signal.SIGTERM)]
    run = built(small_runs.options(folder, "a", *SHORT, *more), *stop)
    if until is not None:
        run.trainer.fit_loop.epoch_loop.max_steps = until
    fit(run)


def newest(folder: Path) -> Checkpoint:
    return small_runs.newest(folder / "a")


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Weights, optimiser, schedule, random generators, positions, monitors: every bit of them."""
    names = (WEIGHTS, STATE_TENSORS, STATE)
    return {name: (checkpoint.path / name).read_bytes() for name in names}


def column(folder: Path, key: str, name: str = "a") -> list[float]:
    """The numbers of one key in all rows of a run."""
    rows = read_rows(folder / name / "metrics.jsonl")
    return [row[key] for row in rows if key in row]


def losses(folder: Path, name: str = "a") -> list[float]:
    return column(folder, "train/nats", name)


def validated(folder: Path) -> list[int]:
    """The steps after which a run was validated."""
    rows = read_rows(folder / "a" / "metrics.jsonl")
    return [row["step"] for row in rows if "val/bpc" in row]


def assert_same(folder: Path, *ignored: str) -> None:
    """Whether the run that was stopped ended as the one that was trained at once."""
    one, other = contents(newest(folder)), contents(small_runs.newest(folder / "once"))
    assert [name for name in one if one[name] != other[name] and name not in ignored] == []
    assert losses(folder) == losses(folder, "once")
