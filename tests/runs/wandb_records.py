"""Reads what an offline W&B run wrote: a LevelDB-style log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(path: Path) -> Iterator[bytes]:
    """The records' bytes; a record may be split over blocks of 32 KiB."""
    content = path.read_bytes()
    position, parts = FILE_HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        start = position + HEADER
        position = start + length
        if kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        parts = (
            content[start:position] if kind in (FULL, FIRST) else parts + content[start:position]
        )
        if kind in (FULL, LAST):
            yield parts


def history_and_config(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], int | None]:
    """Logged rows, configuration and exit code of the offline run below a folder."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    exit_code = None
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        match record.WhichOneof("record_type"):
            case "history":
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            case "run":
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            case "exit":
                exit_code = record.exit.exit_code
    return rows, config, exit_code
