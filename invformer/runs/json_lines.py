"""Writing metrics.jsonl, as a logger of Lightning's; reading it (run_log.py) needs no Lightning."""

import bisect
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from invformer.errors import StorageError
from invformer.runs.files import open_kept, read_regular, replace_file, require_lock
from invformer.runs.run_log import read_row

DAMAGED = "metrics.damaged"  # beside metrics.jsonl: the lines of it that are no rows

log = logging.getLogger(__name__)


class JsonLinesLogger(Logger):
    """``metrics.jsonl``, the record of the run: one JSON object per line, one line per step.

    A resumed run writes the rows from ``first_step`` on again, so the old ones are dropped first.
    Lines that are no rows, or whose step is out of order, are moved to ``metrics.damaged``, and a
    warning names the steps without a row.

    The newest row waits until a later step or :meth:`save`: the numbers of a validation join it.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self.row: dict[str, Any] = {"step": -1}  # the newest
        self.begin: int | None = None  # of its line in the file, if it has one
        self.is_saved = True
        try:
            self._take_up(first_step)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error

    @property
    def name(self) -> str:
        """Of the run."""
        return self.path.parent.name

    @property
    def version(self) -> None:
        """A continued run has the same file."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in ``config.yaml``."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take one row, or more numbers of the newest one; a number that is not finite as text."""
        if step != self.row["step"]:
            self.save()
            self.row, self.begin = {"step": step}, None
        self.row |= {k: v if math.isfinite(v) else str(v) for k, v in sorted(metrics.items())}
        self.is_saved = False

    def save(self) -> None:
        """Write the newest row, which replaces its line if it has one."""
        if self.is_saved:
            return
        require_lock(self.path.parent)
        line = json.dumps(self.row).encode() + b"\n"
        try:
            if self.begin is None:
                with open_kept(self.path) as file:
                    self.begin = file.seek(0, os.SEEK_END)
                    file.write(line)
            else:
                replace_file(self.path, read_regular(self.path)[: self.begin] + line)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics ({error.strerror})") from error
        self.is_saved = True

    def _take_up(self, first_step: int) -> None:
        """Keep the rows before a step, move away what is damaged, say what is missing."""
        content = read_regular(self.path) if os.path.lexists(self.path) else b""
        lines = content.split(b"\n")
        rows = {n: row for n, line in enumerate(lines) if (row := read_row(line))}
        in_order = longest_increase({n: row["step"] for n, row in rows.items()})
        kept = [n for n in in_order if rows[n]["step"] < first_step]
        report_gaps(self.path, [rows[n]["step"] for n in kept], first_step)
        others = set(range(len(lines))).difference(in_order)
        if damaged := [lines[n] for n in sorted(others) if lines[n]]:
            with open_kept(self.path.with_name(DAMAGED)) as file:
                file.write(b"\n".join(damaged) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            log.warning("%s: %d damaged lines are now in %s", self.path, len(damaged), DAMAGED)
        whole = b"".join(lines[n] + b"\n" for n in kept)
        if whole != content:
            replace_file(self.path, whole)
        if kept:
            self.row, self.begin = rows[kept[-1]], len(whole) - len(lines[kept[-1]]) - 1


def longest_increase(steps: Mapping[int, int]) -> list[int]:
    """The keys of the longest subsequence of increasing steps."""
    ends: list[int] = []  # the smallest step at which a subsequence of each length ends
    keys: list[int] = []  # of these steps
    before: dict[int, int | None] = {}
    for key, step in steps.items():
        length = bisect.bisect_left(ends, step)
        before[key] = keys[length - 1] if length else None
        ends[length : length + 1], keys[length : length + 1] = [step], [key]
    found: list[int] = []
    last = keys[-1] if keys else None
    while last is not None:
        found.append(last)
        last = before[last]
    return found[::-1]


def report_gaps(path: Path, steps: Sequence[int], first_step: int) -> None:
    """Warn about the steps before ``first_step`` that have no row."""
    gaps = [(a + 1, b - 1) for a, b in pairwise([-1, *steps, first_step]) if b - a > 1]
    if gaps:
        named = ", ".join(f"{a} to {b}" for a, b in gaps)
        log.warning("%s: there are no rows for steps %.200s", path, named)
