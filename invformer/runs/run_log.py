"""Reading metrics.jsonl: one JSON object per line, one line per optimiser step."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from invformer.runs.files import read_regular

MAX_STEP = 10**9

Row = dict[str, float]

BRANCH = re.compile(r"lipschitz_branches/(.+)/(\w+)")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without damaged lines."""
    lines = read_regular(path).split(b"\n")
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


def by_branch(row: Mapping[str, float]) -> dict[str, Row]:
    """``estimate``, ``local_bound`` and ``bound`` of every branch that a row has numbers of."""
    found: dict[str, Row] = {}
    for key, value in row.items():
        if match := BRANCH.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = value
    return found
