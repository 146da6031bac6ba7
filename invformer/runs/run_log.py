"""Metrics of a run: kept on the device, flushed now and then, one row per optimiser step."""

import bisect
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invformer.errors import StorageError
from invformer.runs.files import open_kept, open_regular, replace_file
from invformer.runs.run_lock import require_lock

MAX_STEP = 10**9
MOST_GAPS = 5  # that one warning names
DAMAGED = "metrics.damaged"  # beside metrics.jsonl: the lines of it that are no rows

log = logging.getLogger(__name__)

Row = dict[str, float]
# What may be recorded: a scalar by its key, or a vector by the keys of its entries.
Measured = Mapping[str | tuple[str, ...], Tensor | float]
Sink = Callable[[int, Row], None]


class RunLog:
    """Collects scalars per step without synchronising, and hands complete rows to its sinks.

    ``record`` never waits for the device: tensors stay there until :meth:`flush` copies all of them
    with a single transfer. Rows leave in the order of their steps, each step once.

    Args:
        sinks: called with (step, row) for every finished row.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks
        self._pending: dict[int, dict[str | tuple[str, ...], Tensor | float]] = {}

    def record(self, step: int, values: Measured) -> None:
        """Remember numbers of one optimiser step (detached tensors on any device, or floats)."""
        self._pending.setdefault(step, {}).update(values)

    def flush(self, before: int | None = None) -> dict[int, Row]:
        """Send pending rows to the sinks; the only place that waits for the device.

        Args:
            before: keep the rows from this step on, because more may come for them; None sends all.

        Returns:
            The rows that were sent, by step, for checks on the host.
        """
        complete = {s: r for s, r in self._pending.items() if before is None or s < before}
        self._pending = {s: r for s, r in self._pending.items() if s not in complete}
        rows = to_host(complete)
        for step in sorted(rows):
            for sink in self.sinks:
                sink(step, rows[step])
        return rows


def to_host(pending: Mapping[int, Measured]) -> dict[int, Row]:
    """The same rows as floats, with one device-to-host copy for all tensors together."""
    rows: dict[int, Row] = {step: {} for step in pending}
    places: list[tuple[int, str]] = []
    tensors: list[Tensor] = []
    for step, row in pending.items():
        for key, value in row.items():
            keys = (key,) if isinstance(key, str) else key
            if isinstance(value, Tensor):
                places += [(step, name) for name in keys]
                tensors.append(value.detach().double().flatten())
            else:
                rows[step] |= {name: float(value) for name in keys}
    values = torch.cat(tensors).tolist() if tensors else []
    for (step, key), value in zip(places, values, strict=True):
        rows[step][key] = value
    return rows


class JsonLinesSink:
    """Appends every row to ``metrics.jsonl``, which is the record of the run.

    A resumed run writes the rows from ``first_step`` on again, so the old ones are dropped first.
    Lines that are no rows, or whose step is out of order, are moved to ``metrics.damaged``, and a
    warning names the steps without a row. If the run was stopped during a validation, the numbers
    of that validation join the last row.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self.path = path
        self.newest = -1
        self._begin = 0  # of the newest row in the file
        try:
            self._take_up(first_step)
        except FileNotFoundError:
            report_gaps(path, [], first_step)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error

    def __call__(self, step: int, row: Row) -> None:
        """Write one row; non-finite numbers become the strings JSON lacks a literal for."""
        require_lock(self.path.parent)
        finite = {k: v if math.isfinite(v) else str(v) for k, v in sorted(row.items())}
        try:
            if step == self.newest:
                content = read_all(self.path)
                last = read_row(content[self._begin :]) or {"step": step}
                joined = json.dumps(last | finite).encode() + b"\n"
                replace_file(self.path, content[: self._begin] + joined)
                return
            with open_kept(self.path) as file:
                self._begin = file.seek(0, os.SEEK_END)
                file.write(json.dumps({"step": step, **finite}).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics ({error.strerror})") from error
        self.newest = step

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


def read_all(path: Path) -> bytes:
    """The content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without damaged lines."""
    lines = read_all(path).split(b"\n")
    return [row for line in lines if (row := read_row(line)) is not None]


def read_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds: a step and numbers. None if it is damaged."""
    try:
        row = json.loads(line.decode("utf-8"))
        [float(value) for value in row.values()]
        step = row["step"]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return row if type(step) is int and 0 <= step <= MAX_STEP else None


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
        named = ", ".join(f"{a} to {b}" for a, b in gaps[:MOST_GAPS])
        more = f" and {len(gaps) - MOST_GAPS} more gaps" if len(gaps) > MOST_GAPS else ""
        log.warning("%s: there are no rows for steps %s%s", path, named, more)
    return bool(gaps)
