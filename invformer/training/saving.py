"""What a run saves, and how: complete files under their names, random generators included."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from invformer.errors import StorageError


class Checkpoints(L.Callback):
    """Keeps ``last.ckpt`` (newest validation or interruption) and ``best.ckpt`` (lowest bpc).

    Files appear under their names only when they are complete. A run that stops because a number is
    not finite, or because of a bug, leaves the checkpoints as they were.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = math.inf

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what was just validated (the metrics were flushed, hence checked, before)."""
        bpc = float(trainer.callback_metrics["val/bpc"])
        is_best = bpc < self.best
        self.best = min(self.best, bpc)
        self.save(trainer, "last.ckpt")
        if is_best and trainer.is_global_zero:
            replace_file(
                self.folder / "best.ckpt", lambda p: shutil.copyfile(self.folder / "last.ckpt", p)
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save the state at an interruption, from which the same command continues."""
        interrupted = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if interrupted and all(p.isfinite().all() for p in pl_module.parameters()):
            self.save(trainer, "last.ckpt")

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint beside its final place, then move it there.

        Raises:
            StorageError: the folder cannot be written.
        """
        partial = self.folder / (name + ".partial")
        try:
            trainer.save_checkpoint(partial)  # all processes take part
        except OSError as error:
            raise StorageError(f"{partial}: cannot be written ({error.strerror})") from error
        if trainer.is_global_zero:
            replace_file(self.folder / name, lambda path: path)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best value so far."""
        self.best = float(state_dict["best"])


class RandomState(L.Callback):
    """Carries the random generators' states in the checkpoint, which Lightning leaves out."""

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """States of the CPU and of every CUDA generator."""
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts: setting up consumes random numbers."""
        self._restored = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the states at the last moment before the first batch."""
        if self._restored is not None:
            torch.set_rng_state(self._restored["cpu"])
            torch.cuda.set_rng_state_all(self._restored["cuda"])


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write ``NAME.partial`` in the same folder (``write`` may find it there), then rename it.

    Raises:
        StorageError: the folder cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
