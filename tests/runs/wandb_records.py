"""Reads what an offline W&B run wrote: a LevelDB-style log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7  # the file begins with 7 bytes too
FULL, LAST = 1, 4  # kinds of parts that end a record


def payloads(path: Path) -> Iterator[bytes]:
    """The records' bytes; a record may be split over blocks of 32 KiB."""
    content = path.read_bytes()
    position, parts = HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        start, position = position + HEADER, position + HEADER + length
        parts += content[start:position]
        if kind in (FULL, LAST):
            yield parts
            parts = b""


@dataclass
class Records:
    """What one run has written."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)  # names and globs of metrics without charts
    files: set[str] = field(default_factory=set)  # below the offline run's ``files``
    artifacts: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    exit_code: int | None = None


def read_records(folder: Path, number: int = 0) -> Records:
    """The records of the offline run of this number below a folder."""
    path = sorted(folder.glob("wandb/offline-run-*/*.wandb"))[number]
    found = Records()
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        match record.WhichOneof("record_type"):
            case "history":
                found.rows.append(values(record.history.item))
            case "run":
                found.config |= values(record.run.config.update)
            case "config":
                found.config |= values(record.config.update)
            case "summary":
                found.summary |= values(record.summary.update)
            case "metric" if record.metric.options.hidden:
                found.hidden.append(record.metric.name or record.metric.glob_name)
            case "artifact":
                found.artifacts.append(record.artifact.name)
            case "files":
                found.files |= {file.path for file in record.files.files}
            case "alert":
                found.alerts.append(record.alert.title)
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def values(items: Any) -> dict[str, Any]:
    """Keys and values of one record."""
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def charts(found: Records) -> set[str]:
    """The keys that have a chart: not hidden, a table or picture once, without W&B's own."""
    keys = set()
    for key in set().union(*found.rows):
        parts = key.split("/")
        name = "/".join(parts[:2]).removesuffix("_table") if parts[0] == "view" else key
        if not name.startswith("_") and not any(fnmatch(name, glob) for glob in found.hidden):
            keys.add(name)
    return keys
