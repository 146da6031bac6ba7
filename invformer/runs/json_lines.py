"""Writing metrics.jsonl, as a logger of Lightning's; reading it (run_log.py) needs no Lightning."""

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
    Lines that are no rows, or have the step of another row, are moved to ``metrics.damaged``, and a
    warning names the steps without a row.

    The newest row waits until a later step or :meth:`save`: the numbers of a validation join it.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self.step, self.row = -1, Row()  # that waits
        self.newest = -1  # step in the file
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
                begin = content.rfind(b"\n", 0, -1) + 1
                last = read_row(content[begin:]) or {"step": self.step}
                joined = json.dumps(last | finite).encode() + b"\n"
                replace_file(self.path, content[:begin] + joined)
            else:
                with open_kept(self.path) as file:
                    file.write(json.dumps({"step": self.step, **finite}).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics ({error.strerror})") from error
        self.newest, self.row = self.step, Row()

    def _take_up(self, first_step: int) -> None:
        """Keep the rows before a step, move away what is damaged, say what is missing."""
        content = read_all(self.path)
        found = [(line, read_row(line)) for line in content.split(b"\n") if line]
        ours = [n for n, (_, row) in enumerate(found) if row and row["step"] < first_step]
        end = ours[-1] + 1 if ours else 0  # what follows is written again
        kept: dict[int, bytes] = {}
        damaged = []
        for line, row in found[:end]:
            if row is None or row["step"] >= first_step or row["step"] in kept:
                damaged.append(line)
            else:
                kept[row["step"]] = line
        if report_gaps(self.path, sorted(kept), first_step):
            damaged += [line for line, row in found[end:] if row is None]
        if damaged:
            with open_kept(self.path.with_name(DAMAGED)) as file:
                file.write(b"\n".join(damaged) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            log.warning("%s: %d damaged lines are now in %s", self.path, len(damaged), DAMAGED)
        whole = b"".join(line + b"\n" for _, line in sorted(kept.items()))
        if whole != content:
            replace_file(self.path, whole)
        self.newest = max(kept, default=-1)


def report_gaps(path: Path, steps: Sequence[int], first_step: int) -> bool:
    """Warn about the steps before ``first_step`` that have no row; whether there are any."""
    gaps = [(a + 1, b - 1) for a, b in pairwise([-1, *steps, first_step]) if b - a > 1]
    if gaps:
        named = ", ".join(f"{a} to {b}" for a, b in gaps)
        log.warning("%s: there are no rows for steps %.200s", path, named)
    return bool(gaps)
