"""Signals, kill -9 and full disks: said in one line, and continued to the same bits."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.kills import FAST, MODELS, kill_and_resume
from tests.support.processes import ROOT
from tests.support.small_runs import DROPOUT, difference, newest, options, without_plots, write_text

INT, TERM, HANG_UP = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)
MODULE = "invformer.training.module"
STEP, UPDATED = f"{MODULE}:CharLanguageModel.training_step", f"{MODULE}:refresh_normalisers"
VALIDATION = f"{MODULE}:CharLanguageModel.validation_step"
WRITE = "invformer.runs.checkpoint:write_new"
# Where one run is stopped again and again; each start counts its calls anew.
PLACES = {
    "twice, the second time while the state is being saved": [(STEP, 3, TERM), (WRITE, 2, INT)],
    "in a forward pass, as its terminal is closed": [(STEP, 1, HANG_UP)],
    "after the update before a validation": [(UPDATED, 2, TERM)],
    "in a validation": [(VALIDATION, 2, TERM)],
    "between backward and update, after its terminal was closed under nohup": [
        (f"{MODULE}:CharLanguageModel.refuse_lost_update", 3, INT), (STEP, 1, HANG_UP),
    ],
    "twice": [(STEP, 1, TERM), (UPDATED, 2, INT)],
    "while certifying": [("invformer.training.callbacks:enforce", 1, TERM)],
    "in a checkpoint's write": [(WRITE, 3, TERM)],
    "in the last validation": [(VALIDATION, 2, INT)],
    "in the last checkpoint's write": [(WRITE, 2, TERM)],
}  # fmt: skip


def hears_hang_up() -> None:
    """Called in a run before it starts, whatever these tests were started with."""
    without_plots()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def is_under_nohup() -> None:
    """Called in a run before it starts: SIGHUP is ignored, as nohup leaves it."""
    without_plots()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_stopped_run_saves_its_state_and_continues_to_the_same_bits(
    zygote, root, uninterrupted
) -> None:
    arguments = options(root, "stopped")
    steps = []
    for place, signals in PLACES.items():
        began = time.monotonic()
        how, number = is_under_nohup if "nohup" in place else hears_hang_up, signals[0][2]
        ended = zygote.run(arguments, signals=signals, before=f"{__name__}:{how.__name__}")
        assert ended.code == 128 + number, (place, ended.stderr)
        assert ended.stderr.count("\n") == 1, place
        saved, name = newest(root / "stopped"), signal.Signals(number).name
        said = f"error: interrupted at step {saved.step} by {name}, saved"
        assert ended.stderr.startswith(said), (place, ended.stderr)
        assert time.time() - saved.path.stat().st_mtime < time.monotonic() - began, place
        steps.append(saved.step)
    in_a_write = steps.pop(7)  # which a thread does while the run goes on
    assert 10 <= in_a_write < 15
    assert steps == [3, 4, 5, 5, 6, 7, 10, 15, 15]
    ended = zygote.run(arguments, before=FAST)
    assert ended.code == 0, ended.stderr
    assert difference(uninterrupted["contractive"], root / "stopped") is None


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    "place", ["invformer.training.build:build_data", "invformer.training.build:build_callbacks"]
)
def test_a_run_stopped_while_it_starts_ends_at_once_in_one_line(
    zygote, root, place: str, number: int
) -> None:
    name = f"start-{place.rpartition('_')[2]}-{number}"
    ended = zygote.run(options(root, name), signals=[(place, 1, number)], before=FAST)
    assert ended.code == 128 + number
    assert ended.stderr.startswith("error: stopped by SIG")
    assert ended.stderr.count("\n") == 1


def test_a_run_stopped_after_its_training_has_nothing_to_lose(zygote, root, uninterrupted) -> None:
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


def test_a_run_whose_console_is_lost_goes_on_to_the_same_bits(zygote, root, uninterrupted) -> None:
    arguments = options(root, "unread", "trainer.progress=true", "trainer.sample_length=5")
    assert zygote.run(arguments, before=f"{__name__}:without_console").code == 0
    assert difference(uninterrupted["contractive"], root / "unread") is None
    assert (root / "unread" / "sample.txt").exists()


WRITES = 9  # files written before the disk is full: one checkpoint, and a part of the next


def full_after_a_while() -> None:
    """Called in a run before it starts: from some file on, nothing longer than 1 KiB is taken."""
    from invformer.runs import checkpoint as directory

    without_plots()
    write, written = directory.write_new, []

    def limited(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == WRITES:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        write(path, content)

    directory.write_new = limited


def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_was_saved(
    zygote, root, uninterrupted
) -> None:
    arguments = options(root, "full", model=DROPOUT)
    ended = zygote.run(arguments, before=f"{__name__}:full_after_a_while")
    assert ended.code == 7, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert newest(root / "full").step
    assert zygote.run(arguments, before=FAST).code == 0
    assert difference(uninterrupted["dropout"], root / "full") is None


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [60, 200, 300])
def test_a_file_system_that_is_too_small_ends_the_run_in_one_line(tmp_path, kilobytes: int) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("needs unprivileged mounts")
    write_text(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    words = options(tmp_path, "a", f"run.root={small}", "logger.name=wandb", model=DROPOUT)
    script = f'mount -t tmpfs -o size={kilobytes}k none {small} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "train.py", *words],
        cwd=ROOT, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr


KILLS = 3


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_again_and_again_ends_as_the_uninterrupted_one(
    zygote, root, uninterrupted, durations, seed: int
) -> None:
    model = "dropout" if seed % 2 else "contractive"
    kills = part = 0
    while kills < KILLS:
        killed = kill_and_resume(
            zygote, root, f"killed-{seed}-{part}", uninterrupted[model], model=MODELS[model],
            kills=KILLS - kills, seconds=min(durations.values()), seed=100 * part + seed,
        )  # fmt: skip
        assert killed.failure is None, killed
        kills += killed.kills
        part += 1
