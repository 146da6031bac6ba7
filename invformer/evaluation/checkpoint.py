"""Which checkpoint a path means, and opening it without executing anything in it."""

import logging
import os
from pathlib import Path

from invformer.config.trained import HUB_NAME
from invformer.errors import CheckpointError
from invformer.runs.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    NAME,
    Checkpoint,
    newest_checkpoint,
    open_checkpoint,
)
from invformer.runs.contained import one_line

log = logging.getLogger(__name__)


def read_checkpoint(path: str) -> Checkpoint:
    """Open one checkpoint, or the best of a run folder (else the newest), and run no code in it.

    USER/NAME that is no folder is a model on the Hugging Face Hub. A damaged checkpoint in a run
    folder is passed over with a warning; so is a best one that is gone.

    Raises:
        CheckpointError: an address instead of a path, a missing, damaged or foreign checkpoint.
    """
    if "://" in path:
        raise CheckpointError(f"{path}: download it first; only local checkpoints are opened")
    folder = Path(os.path.expanduser(path))
    if HUB_NAME.fullmatch(path) and not folder.exists():
        folder = download(path)
    try:
        if folder.is_file() or (folder / MANIFEST).exists():
            return open_checkpoint(folder)
        if (folder / "model.safetensors").exists():
            raise CheckpointError(f"{folder}: an older export, which commit 3630c28 reads")
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


def download(name: str) -> Path:
    """The folder that a model on the Hub is kept in, which is brought up to date.

    Raises:
        CheckpointError: there is no such model on the Hub, and no such folder here.
    """
    from huggingface_hub import constants, snapshot_download

    folder = Path(constants.HF_HOME, "invformer", name)  # of files: links are not followed
    try:
        return Path(snapshot_download(name, local_dir=folder))
    except Exception as error:  # which ones differs between releases
        raise CheckpointError(
            f"{name}: no folder here, and no model on the Hub ({one_line(error)})"
        ) from None
