"""A disk that takes no more: code 7 in one line, and what was saved before stays good."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kills import FAST
from tests.support.processes import ROOT
from tests.support.small_runs import DROPOUT, difference, newest, options, without_plots, write_text
from tests.support.zygote import Zygote

WRITES = 9  # files written before the disk is full: one checkpoint, and a part of the next


def full_after_a_while() -> None:
    """Called in a run before it starts: from some file on, nothing longer than 1 KiB is taken."""
    from invformer.runs import writing as directory

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
    zygote: Zygote, root: Path, uninterrupted: dict[str, Path]
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
def test_a_file_system_that_is_too_small_ends_the_run_in_one_line(
    tmp_path: Path, kilobytes: int
) -> None:
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
