"""Find the checkpoint that a path names, and open it without executing anything in it."""

import logging
import os
from pathlib import Path

from invformer.errors import CheckpointError
from invformer.runs.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    Checkpoint,
    newest_checkpoint,
    open_checkpoint,
    saved_in,
)

log = logging.getLogger(__name__)


def read_checkpoint(path: str) -> Checkpoint:
    """Open one checkpoint, or the best of a run folder (else the newest), and run no code in it.

    A damaged one in a run folder is passed over with a warning; so is a best one that is gone.

    Raises:
        CheckpointError: it is missing, damaged or foreign.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_file() or (folder / MANIFEST).exists():
            return open_checkpoint(folder)
        newest, refused = newest_checkpoint(folder / CHECKPOINTS)
        if newest is None:
            wanted = "holds no checkpoint" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"{folder} {wanted}: name a run folder or a checkpoint in it")
        found = best_checkpoint(newest)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(f"{path:.200}: cannot be read ({error.strerror})") from None
    for reason in refused:
        log.warning("%s; taking %s", reason, found.path.name)
    return found


def best_checkpoint(newest: Checkpoint) -> Checkpoint:
    """The best checkpoint, which the newest names; with a warning the newest if it is lost."""
    name, folder = newest.metadata.get("best"), newest.path.parent
    if name in (None, newest.path.name):
        return newest
    try:
        path = next((path for path in saved_in(folder) if path.name == name), None)
        if path is None:
            raise CheckpointError(f"{folder}: the best checkpoint is not there any more")
        best = open_checkpoint(path)
        best.verify()
        return best
    except CheckpointError as error:
        log.warning("%s; taking %s, the newest, not the best", error, newest.path.name)
        return newest
