"""Runs of ``train.py``: as a study starts and reads them."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from invformer.errors import InvformerError
from invformer.processes.ranks import handlers_restored, hear_to_stop
from invformer.runs.run_directory import METRICS
from invformer.runs.run_log import read_rows

ROOT = Path(__file__).parents[1]


def call(program: str, *words: str) -> None:
    """Run a command of the project; what it prints goes to stderr.

    Signals to stop are passed on, so that a training can save before the study ends. It may hear
    Ctrl-C twice, from the terminal and from here; the second time changes nothing. If the command
    fails, InvformerError is raised.
    """
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        process.send_signal(number)

    process = subprocess.Popen([sys.executable, str(ROOT / program), *words], stdout=sys.stderr)
    with handlers_restored():
        hear_to_stop(pass_on)
        code = process.wait()
    if heard:
        signal.raise_signal(heard[0])  # now that the run has saved
    if code:
        raise InvformerError(f"{program} {' '.join(words)} ended with exit code {code}")


def words_of(options: Any) -> list[str]:
    """What a study's options tell ``train.py``: threads and overrides, quoted as for a shell."""
    threads = options.num_threads
    chosen = [] if threads is None else [f"trainer.num_threads={threads}"]
    return [*chosen, *map(shlex.quote, options.overrides)]


def place_of(case: Any) -> list[str]:
    """What a case's run tells ``train.py``: its folder and its seed."""
    return [f"run.root={case.folder}", f"run.name={case.run.name}", f"run.seed={case.seed}"]


def validations(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's validations."""
    return [row for row in read_rows(run / METRICS) if "val/nats" in row]
