"""What a run saves and when: complete under its name, random generators included."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from invformer.errors import CheckpointError, Interrupted, StorageError
from invformer.runs.checkpoint import open_checkpoint
from invformer.runs.checkpoint_directory import NAME, keep_only, name_for
from invformer.runs.checkpoint_io import DATA, METADATA
from invformer.runs.resume import (
    follow_schedule,
    refuse_other_parts,
    refuse_other_schedule,
    refuse_other_state,
)
from invformer.training.module import CharLanguageModel


class Checkpoints(L.Callback):
    """Saves at every validation and interruption; keeps the last two and the best (lowest bpc).

    The best is the checkpoint whose name every later one carries. Nothing is deleted before the
    checkpoint that replaces it was read back. A run that stops because a number is not finite, or
    because of a bug, leaves the checkpoints as they were.

    Args:
        folder: where the checkpoints go.
        previous: name of the checkpoint the run continues from.
    """

    def __init__(self, folder: Path, previous: str | None = None) -> None:
        self.folder = folder
        self.previous = previous
        self.best = math.inf
        self.best_name: str | None = None
        self.restored_step: int | None = None
        self.started = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on there is a state worth saving, once it is known to be one of this run."""
        assert isinstance(pl_module, CharLanguageModel)
        if self.restored_step is not None:
            fresh = pl_module.make_optimizer(pl_module.model)
            refuse_other_state(trainer, fresh, self.restored_step)
            follow_schedule(trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)
        self.started = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what was just validated (the metrics were flushed, hence checked, before)."""
        bpc = float(trainer.callback_metrics["val/bpc"])
        name = name_for(self.folder, trainer.global_step)
        kept = {self.previous, self.best_name}  # the previous one names the best so far
        if bpc < self.best:
            self.best, self.best_name = bpc, name
        self.save(trainer, name, kept)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save the state at an interruption, from which the same command continues."""
        if not (isinstance(exception, Interrupted) and self.started):
            return
        assert isinstance(pl_module, CharLanguageModel)
        pl_module.gather()
        if all(p.isfinite().all() for p in pl_module.parameters()):
            self.save(trainer, name_for(self.folder, trainer.global_step), {self.previous})

    def save(self, trainer: L.Trainer, name: str, kept: set[str | None]) -> None:
        """Write a checkpoint, read it back, and only then delete what is no longer needed.

        Args:
            trainer: whose state it is.
            name: of the new checkpoint.
            kept: names of checkpoints to keep besides the new and the best one.

        Raises:
            StorageError: the folder cannot be written, or does not give back what was written.
        """
        trainer.save_checkpoint(self.folder / name)  # all processes take part
        if trainer.is_global_zero:
            try:
                open_checkpoint(self.folder / name).manifest.verify()
                keep_only(self.folder, {name, self.best_name, *kept})
            except CheckpointError as error:
                raise StorageError(f"just written, and not read back: {error}") from None
            except OSError as error:
                raise StorageError(f"{self.folder}: cannot delete ({error.strerror})") from error
        self.previous = name

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Name the best checkpoint where evaluation looks."""
        checkpoint.setdefault(METADATA, {})["best"] = self.best_name

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a state that lacks something: the run would go on, but differently."""
        assert isinstance(pl_module, CharLanguageModel)
        refuse_other_parts(trainer, checkpoint, DATA)
        self.restored_step = step = checkpoint["global_step"]
        fresh = pl_module.make_schedule(pl_module.make_optimizer(pl_module.model))
        (schedule,) = checkpoint["lr_schedulers"]
        refuse_other_schedule(f"{trainer.ckpt_path}", schedule, fresh, step)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and where it is."""
        return {"best": self.best, "best_name": self.best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best value so far.

        Raises:
            CheckpointError: it is no such value, or its place no name of a checkpoint.
        """
        best, name = state_dict["best"], state_dict["best_name"]
        is_found = isinstance(name, str) and NAME.fullmatch(name) and math.isfinite(best)
        if type(best) is not float or not (is_found or (name is None and best == math.inf)):
            raise CheckpointError(f"{best!r:.40} in {name!r:.40} is no best value so far")
        self.best, self.best_name = best, name


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
