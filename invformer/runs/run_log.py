"""Metrics of a run: kept on the device, flushed now and then, one row per optimiser step."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from invformer.errors import StorageError

log = logging.getLogger(__name__)

Row = dict[str, float]
# What may be recorded: a scalar by its key, or a vector by the keys of its entries.
Measured = Mapping[str | tuple[str, ...], Tensor | float]
Sink = Callable[[int, Row], None]


class RunLog:
    """Collects scalars per step without synchronising, and hands complete rows to its sinks.

    ``record`` never waits for the device: tensors stay where they are until :meth:`flush` copies
    all of them with a single transfer. Rows leave in the order of their steps, each step once, with
    everything that was recorded for it.

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
    """Appends every row to ``metrics.jsonl``; what is in that file is the record of the run.

    After a resume the rows from ``first_step`` on are about to be written again, so the old ones
    are dropped first: every step stands in the file once. The row before them may still get the
    numbers of its validation, if the run was stopped during that.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self.path = path
        self.newest = -1
        if path.exists():
            self._replace([row for row in read_rows(path) if row["step"] < first_step])
        if self.newest + 1 < first_step:
            log.warning(
                "%s: the rows of steps %d to %d are lost; the run goes on without them",
                path, self.newest + 1, first_step - 1,
            )  # fmt: skip

    def __call__(self, step: int, row: Row) -> None:
        """Write one row; non-finite numbers become the strings JSON lacks a literal for."""
        finite = {k: v if math.isfinite(v) else str(v) for k, v in sorted(row.items())}
        try:
            if step == self.newest:
                *rows, last = read_rows(self.path)
                self._replace([*rows, last | finite])
                return
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **finite}) + "\n")
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics ({error.strerror})") from error
        self.newest = step

    def _replace(self, rows: list[dict]) -> None:
        replaced = self.path.with_suffix(".rewrite")
        replaced.write_text("".join(json.dumps(row) + "\n" for row in rows))
        replaced.replace(self.path)
        self.newest = rows[-1]["step"] if rows else -1


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file; a last line torn by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
