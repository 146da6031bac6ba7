"""Which checkpoint a path means, and opening it without executing anything in it."""

import logging
import os
from pathlib import Path

from invformer.errors import CheckpointError
from invformer.runs.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    NAME,
    Checkpoint,
    newest_checkpoint,
    open_checkpoint,
)

log = logging.getLogger(__name__)


def read_checkpoint(path: str) -> Checkpoint:
    """Open one checkpoint, or the best of a run folder (else the newest), and run no code in it.

    A damaged one in a run folder is passed over with a warning; so is a best one that is gone.

    Raises:
        CheckpointError: an address instead of a path, a missing, damaged or foreign checkpoint.
    """
    if "://" in path:
        raise CheckpointError(f"{path}: download it first; only local checkpoints are opened")
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_file() or (folder / MANIFEST).exists():
            return open_checkpoint(folder)
        newest, refused = newest_checkpoint(folder / CHECKPOINTS)
        if newest is None:
            wanted = "holds no checkpoint" if folder.is_dir() else "does not exist"
            pickles = any(folder.glob("*.ckpt"))
            old = " (*.ckpt files are pickles and not opened)" if pickles else ""
            raise CheckpointError(
                f"{folder} {wanted}{old}: name a run folder or a checkpoint in it"
            )
        found = best_checkpoint(newest)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(f"{path:.200}: cannot be read ({error.strerror})") from None
    for reason in refused:
        log.warning("%s; taking %s", reason, found.path.name)
    return found


def best_checkpoint(newest: Checkpoint) -> Checkpoint:
    """The best checkpoint, which the newest names; with a warning the newest if that one is lost.

    Raises:
        CheckpointError: what it names is no checkpoint.
    """
    name = newest.metadata.get("best")
    if name is None or name == newest.path.name:
        return newest
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CheckpointError(f"{newest.path}: {name!r:.80} is no name of a checkpoint")
    path = newest.path.with_name(name)
    try:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(f"{path}: the best checkpoint is not there any more")
        best = open_checkpoint(path)
        best.verify()
        return best
    except CheckpointError as error:
        log.warning("%s; taking %s, the newest, not the best", error, newest.path.name)
        return newest
