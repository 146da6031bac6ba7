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
from invformer.runs.files import open_kept, replace_file
from invformer.runs.run_lock import require_lock
from invformer.runs.run_log import Row, read_all, read_row

DAMAGED = "metrics.damaged"  # beside metrics.jsonl: the lines of it that are no rows

log = logging.getLogger(__name__)


class JsonLinesLogger(Logger):
    """``metrics.jsonl``, the record of the run: one JSON object per line, one line per step.

    A resumed run writes the rows from ``first_step`` on again, so the old ones are dropped first.
    Lines that are no rows, or whose step is out of order, are moved to ``metrics.damaged``, and a
    warning names the steps without a row.

    The newest row waits until a later step or :meth:`save`: the numbers of a validation join it.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self.step, self.row = -1, Row()  # that waits
        self.newest, self._begin = -1, 0  # step in the file, and where its row begins
        try:
            self._take_up(first_step)
        except FileNotFoundError:
            report_gaps(path, [], first_step)
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
        """Take one row, or more numbers of the newest one."""
        assert step is not None
        if step != self.step:
            self.save()
        self.step = step
        self.row |= metrics

    def save(self) -> None:
        """Append the row that waits, or replace the newest one by it if that has the same step.

        Non-finite numbers become the strings JSON lacks a literal for.
        """
        if not self.row:
            return
        require_lock(self.path.parent)
        finite = {k: v if math.isfinite(v) else str(v) for k, v in sorted(self.row.items())}
        try:
            if self.step == self.newest:
                content = read_all(self.path)
                last = read_row(content[self._begin :]) or {"step": self.step}
                joined = json.dumps(last | finite).encode() + b"\n"
                replace_file(self.path, content[: self._begin] + joined)
            else:
                with open_kept(self.path) as file:
                    self._begin = file.seek(0, os.SEEK_END)
                    file.write(json.dumps({"step": self.step, **finite}).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics ({error.strerror})") from error
        self.newest, self.row = self.step, Row()

    def _take_up(self, first_step: int) -> None:
        """Keep the rows before a step, move away what is damaged, say what is missing."""
        content = read_all(self.path)
        *lines, torn = content.split(b"\n")
        if read_row(torn) is not None:
            lines.append(torn)
        steps = {n: row["step"] for n, line in enumerate(lines) if (row := read_row(line))}
        ordered = longest_increase(steps)
        kept = [n for n in ordered if steps[n] < first_step]
        is_missing = report_gaps(self.path, [steps[n] for n in kept], first_step)
        damaged = [line for n, line in enumerate(lines) if line and n not in set(ordered)]
        if is_missing and torn:  # else it was being written when the process was killed
            damaged.append(torn)
        if damaged:
            with open_kept(self.path.with_name(DAMAGED)) as file:
                file.write(b"\n".join(damaged) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            log.warning("%s: %d damaged lines are now in %s", self.path, len(damaged), DAMAGED)
        whole = b"".join(lines[n] + b"\n" for n in kept)
        if whole != content:
            replace_file(self.path, whole)
        if kept:
            self.newest = steps[kept[-1]]
            self._begin = len(whole) - len(lines[kept[-1]]) - 1


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


def report_gaps(path: Path, steps: Sequence[int], first_step: int) -> bool:
    """Warn about the steps before ``first_step`` that have no row; whether there are any."""
    gaps = [(a + 1, b - 1) for a, b in pairwise([-1, *steps, first_step]) if b - a > 1]
    if gaps:
        named = ", ".join(f"{a} to {b}" for a, b in gaps)
        log.warning("%s: there are no rows for steps %.200s", path, named)
    return bool(gaps)
