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


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint a path means: itself, or the best (else the newest) of a run folder.

    A damaged one in a run folder is passed over with a warning; so is a best one that is gone.

    Raises:
        CheckpointError: there is none, or what there is is refused.
    """
    if path.is_file() or (path / MANIFEST).exists():
        return open_checkpoint(path)
    newest, refused = newest_checkpoint(path / CHECKPOINTS)
    if newest is None:
        wanted = "holds no checkpoint" if path.is_dir() else "does not exist"
        old = " (*.ckpt files are pickles and not opened)" if any(path.glob("*.ckpt")) else ""
        raise CheckpointError(f"{path} {wanted}{old}: name a run folder or a checkpoint in it")
    found = best_checkpoint(newest)
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
    try:
        return whole_checkpoint(newest.path.with_name(name))
    except CheckpointError as error:
        log.warning("%s; taking %s, the newest, not the best", error, newest.path.name)
        return newest


def whole_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint of a run folder, verified to its last byte.

    Raises:
        CheckpointError: it is gone, elsewhere, or damaged.
    """
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path}: the best checkpoint is not there any more")
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return checkpoint


def read_checkpoint(path: str) -> Checkpoint:
    """Open a checkpoint: plain values now, tensors when they are asked for, code never.

    Args:
        path: a run folder, or the directory of one checkpoint.

    Raises:
        CheckpointError: an address instead of a path, a missing, damaged or foreign checkpoint.
    """
    if "://" in path:
        raise CheckpointError(f"{path}: download it first; only local checkpoints are opened")
    try:
        return find_checkpoint(Path(os.path.expanduser(path)))
    except OSError as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(f"{path:.200}: cannot be read ({error.strerror})") from None
