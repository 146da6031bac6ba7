"""Runs of ``train.py`` as a study starts them and reads them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from invformer.errors import InvformerError
from invformer.runs.run_log import read_rows

ROOT = Path(__file__).parents[1]


def call(program: str, *words: str) -> None:
    """Run a command of the project; what it prints goes to stderr.

    Raises:
        InvformerError: it failed.
    """
    code = subprocess.call([sys.executable, str(ROOT / program), *words], stdout=sys.stderr)
    if code:
        raise InvformerError(f"{program} {' '.join(words)} ended with exit code {code}")


def words_of_threads(num_threads: int | None) -> list[str]:
    """The word for ``train.py`` that chooses its threads, if they are chosen."""
    return [] if num_threads is None else [f"trainer.num_threads={num_threads}"]


def validations(run: Path) -> list[dict[str, Any]]:
    """The rows of a run folder's validations."""
    return [row for row in read_rows(run.expanduser() / "metrics.jsonl") if "val/nats" in row]
