"""Reading a checkpoint without executing anything in it."""

import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invformer.errors import CheckpointError

REQUIRED = ("config", "vocabulary", "data_sha256")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds, as plain values and tensors.

    Attributes:
        path: the file.
        directory: the run's folder, where results belong.
        metadata: configuration, vocabulary and provenance, as saved with the run.
        weights: the language model's parameters and buffers by name.
        step: optimiser steps taken.
    """

    path: Path
    directory: Path
    metadata: dict[str, Any]
    weights: dict[str, Tensor]
    step: int


def find_checkpoint(path: Path) -> Path:
    """The checkpoint file a path means: itself, or the best (else the last) of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_file():
        return path
    for name in ("best.ckpt", "last.ckpt"):
        if (path / name).is_file():
            return path / name
    wanted = "holds no best.ckpt or last.ckpt" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {wanted}: name a run folder or a checkpoint file in it")


def read_checkpoint(path: str) -> Checkpoint:
    """Load a checkpoint as tensors and plain values; no code in it is ever run.

    Args:
        path: a run folder or a file.

    Raises:
        CheckpointError: an address instead of a path, a missing, damaged or foreign file.
    """
    if "://" in path:
        raise CheckpointError(f"{path}: download it first; only local checkpoints are opened")
    file = find_checkpoint(Path(path))
    try:
        with warnings.catch_warnings():  # foreign files cause warnings on their way to an error
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        zipfile.BadZipFile,
        ValueError,
    ) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: not a readable checkpoint ({reason})") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    metadata = content.get("invformer") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or any(key not in metadata for key in REQUIRED):
        raise CheckpointError(f"{file}: not an invformer checkpoint (its metadata are missing)")
    prefix = "model."
    weights = {
        name.removeprefix(prefix): value
        for name, value in content.get("state_dict", {}).items()
        if name.startswith(prefix)
    }
    return Checkpoint(file, file.parent, metadata, weights, int(content.get("global_step", 0)))
