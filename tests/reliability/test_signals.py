"""SIGINT, SIGTERM and SIGHUP, wherever they arrive: saved, said, and continued to the same bits."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.kills import FAST
from tests.support.small_runs import difference, newest, options, without_plots
from tests.support.zygote import Zygote

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
MODULE = "invformer.training.module"
STEP, UPDATED = f"{MODULE}:CharLanguageModel.training_step", f"{MODULE}:refresh_normalisers"
VALIDATION = f"{MODULE}:CharLanguageModel.validation_step"
WRITE = "invformer.runs.writing:write_new"
# Where one run is stopped again and again; each start counts its calls anew.
PLACES = {
    "twice, the second time while the state is being saved": [(STEP, 3, TERM), (WRITE, 2, INT)],
    "in a forward pass": [(STEP, 1, TERM)],
    "after the update before a validation": [(UPDATED, 2, TERM)],
    "in a validation": [(VALIDATION, 2, TERM)],
    "between backward and update": [(f"{MODULE}:CharLanguageModel.refuse_lost_update", 3, INT)],
    "twice": [(STEP, 1, TERM), (UPDATED, 2, INT)],
    "while certifying": [("invformer.training.callbacks:enforce", 1, TERM)],
    "in a checkpoint's write": [(WRITE, 3, TERM)],
    "in the last validation": [(VALIDATION, 2, INT)],
    "in the last checkpoint's write": [(WRITE, 2, TERM)],
}


def test_a_stopped_run_saves_its_state_and_continues_to_the_same_bits(
    zygote: Zygote, root: Path, uninterrupted: dict[str, Path]
) -> None:
    arguments = options(root, "stopped")
    steps = []
    for place, signals in PLACES.items():
        began = time.monotonic()
        ended = zygote.run(arguments, signals=signals, before=FAST)
        assert ended.code == 128 + signals[0][2], (place, ended.stderr)
        assert ended.stderr.startswith("error: interrupted at step"), place
        assert ended.stderr.count("\n") == 1, place
        saved = newest(root / "stopped")
        assert f"interrupted at step {saved.step}" in ended.stderr, place
        assert time.time() - saved.path.stat().st_mtime < time.monotonic() - began, place
        steps.append(saved.step)
    in_a_write = steps.pop(7)  # which a thread does while the run goes on
    assert 10 <= in_a_write <= 12
    assert steps == [3, 4, 5, 5, 6, 7, 10, 15, 15]
    ended = zygote.run(arguments, before=FAST)
    assert ended.code == 0, ended.stderr
    assert difference(uninterrupted["contractive"], root / "stopped") is None


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    "place", ["invformer.training.build:build_data", "invformer.training.build:build_callbacks"]
)
def test_a_run_stopped_while_it_starts_ends_at_once_in_one_line(
    zygote: Zygote, root: Path, place: str, number: int
) -> None:
    name = f"start-{place.rpartition('_')[2]}-{number}"
    ended = zygote.run(options(root, name), signals=[(place, 1, number)], before=FAST)
    assert ended.code == 128 + number
    assert ended.stderr.startswith("error: stopped by SIG")
    assert ended.stderr.count("\n") == 1


def hears_hang_up() -> None:
    """Called in a run before it starts, whatever these tests were started with."""
    without_plots()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def is_under_nohup() -> None:
    """Called in a run before it starts: SIGHUP is ignored, as nohup leaves it."""
    without_plots()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_whose_terminal_is_closed_saves_its_state_and_continues_to_the_same_bits(
    zygote: Zygote, root: Path, uninterrupted: dict[str, Path]
) -> None:
    arguments = options(root, "hang-up")
    signals = [(STEP, 4, int(signal.SIGHUP))]
    ended = zygote.run(arguments, signals=signals, before=f"{__name__}:hears_hang_up")
    assert ended.code == 129, ended.stderr
    assert ended.stderr.startswith("error: interrupted at step 4 by SIGHUP, saved")
    assert newest(root / "hang-up").step == 4
    ended = zygote.run(arguments, signals=signals, before=f"{__name__}:is_under_nohup")
    assert ended.code == 0, ended.stderr
    assert difference(uninterrupted["contractive"], root / "hang-up") is None


def test_a_run_stopped_after_its_training_has_nothing_to_lose(
    zygote: Zygote, root: Path, uninterrupted: dict[str, Path]
) -> None:
    arguments = options(root, "conclusion")
    place = "invformer.training.fit:five_gram"
    assert zygote.run(arguments, signals=[(place, 1, TERM)], before=FAST).code == 143
    assert zygote.run(arguments, before=FAST).code == 0
    assert difference(uninterrupted["contractive"], root / "conclusion") is None


def without_console() -> None:
    """Called in a run before it starts: nobody reads what it prints, on either stream."""
    without_plots()
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)


def test_a_run_whose_console_is_lost_goes_on_to_the_same_bits(
    zygote: Zygote, root: Path, uninterrupted: dict[str, Path]
) -> None:
    arguments = options(root, "unread", "trainer.progress=true", "trainer.sample_length=5")
    assert zygote.run(arguments, before=f"{__name__}:without_console").code == 0
    assert difference(uninterrupted["contractive"], root / "unread") is None
    assert (root / "unread" / "sample.txt").exists()
