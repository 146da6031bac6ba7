"""Writing a checkpoint: its files, each on the disk before the manifest."""

import os
import shutil
from collections.abc import Mapping
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
from invformer.runs.files import PARTIAL, make_folder, sync_folder, write_new


def encode(
    metadata: dict[str, Any], weights: Mapping[str, Tensor], state: dict[str, Any]
) -> dict[str, bytes]:
    """The files of a checkpoint, but for its manifest.

    Args:
        metadata: what :func:`open_checkpoint` requires, and provenance.
        weights: the model's parameters and buffers by name.
        state: see ``STATE_KEYS`` and ``LEARNING``; plain values and tensors.

    Raises:
        NonFiniteError: a weight or the optimiser's state is not finite.
    """
    plain, tensors = encoding.pack(state)
    if name := encoding.first_non_finite({**weights, **must_be_finite(tensors)}):
        raise NonFiniteError.at(metadata["step"], f"{name} is not finite and is not saved")
    return {
        MODEL: encoding.dump(metadata),
        WEIGHTS: encoding.to_bytes(weights),
        STATE: encoding.dump(plain),
        STATE_TENSORS: encoding.to_bytes(tensors),
    }


def write_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Make a directory of files and their manifest, on the disk; StorageError leaves nothing."""
    partial = target.with_name(PARTIAL + target.name)
    try:
        make_folder(target.parent)
        partial.mkdir(exist_ok=True)
        for name, content in files.items():
            write_new(partial / name, content)
        records = {name: record_of(content) for name, content in files.items()}
        write_new(partial / MANIFEST, manifest_of(records))
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{target}: cannot be written ({error.strerror}); earlier checkpoints are kept"
        ) from error


def manifest_of(records: Mapping[str, Any]) -> bytes:
    """The manifest of files, given :func:`.record_of` each."""
    return encoding.dump({"format": "invformer checkpoint", "version": 1, "files": records})
