"""Writing a checkpoint: the files of every process, each on the disk before the manifest."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from invformer.errors import NonFiniteError, StorageError
from invformer.runs import encoding
from invformer.runs.checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    STATE_TENSORS,
    WEIGHTS,
    must_be_finite,
    record_of,
)
from invformer.runs.files import PARTIAL, make_folder, replace_file, sync_folder, write_new

PART = "state-{:05d}.safetensors"  # of the optimiser's memory, by the process that keeps it
POLL = 0.05  # seconds between looks at what other processes write


def encode(
    metadata: dict[str, Any], weights: Mapping[str, Tensor], state: dict[str, Any], rank: int = 0
) -> dict[str, bytes]:
    """The files that a process contributes to a checkpoint: all but the others' parts, or its part.

    Args:
        metadata: what :func:`open_checkpoint` requires, and provenance.
        weights: the model's parameters and buffers by name.
        state: see ``STATE_KEYS`` and ``LEARNING``; plain values and tensors, some of them sharded
            along their first axis.
        rank: of the process.

    Raises:
        NonFiniteError: a weight or the optimiser's state is not finite.
    """
    plain, found = encoding.pack(state)
    sharded: dict[str, Any] = {n: t for n, t in found.items() if hasattr(t, "to_local")}
    parts = {n: t.to_local() for n, t in sharded.items()}
    tensors = {n: t for n, t in found.items() if n not in parts}
    if name := encoding.first_non_finite({**weights, **must_be_finite({**tensors, **parts})}):
        raise NonFiniteError.at(metadata["step"], f"{name} is not finite and is not saved")
    own = {PART.format(rank): encoding.to_bytes(parts)} if parts else {}
    if rank:
        return own
    return {
        MODEL: encoding.dump(metadata),
        WEIGHTS: encoding.to_bytes(weights),
        STATE: encoding.dump(plain),
        STATE_TENSORS: encoding.to_bytes(tensors),
        **own,
    }


def write_directory(target: Path, files: Mapping[str, bytes], others: Sequence[str] = ()) -> None:
    """Make a directory of files with a manifest, on the disk; a StorageError leaves nothing of it.

    It waits for the ``others``, files that other processes add by :func:`write_part`.
    """
    partial = target.with_name(PARTIAL + target.name)
    try:
        make_folder(target.parent)
        partial.mkdir(exist_ok=True)
        for name, content in files.items():
            write_new(partial / name, content)
        while not all((partial / name).exists() for name in others):
            partial.stat()  # gone if another process could not write its part
            time.sleep(POLL)
        everything = {**files, **{name: (partial / name).read_bytes() for name in others}}
        records = {name: record_of(content) for name, content in everything.items()}
        write_new(partial / MANIFEST, manifest_of(records))
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{target}: cannot be written ({error.strerror}); earlier checkpoints are kept"
        ) from error


def write_part(target: Path, files: Mapping[str, bytes]) -> None:
    """Add files, each complete under its name, to a directory that another process makes.

    A StorageError leaves nothing of the directory.
    """
    partial = target.with_name(PARTIAL + target.name)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(partial / name, content)
    except (OSError, StorageError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", error)
        raise StorageError(f"{target}: a part cannot be written ({why})") from error


def manifest_of(records: Mapping[str, Any]) -> bytes:
    """The manifest of files, given :func:`.record_of` each."""
    return encoding.dump({"format": "invformer checkpoint", "version": 1, "files": records})
