"""What a run saves and when, and how Lightning's checkpoints become directories and back."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import CheckpointIO

from invformer.errors import CheckpointError, Interrupted, StorageError
from invformer.runs.checkpoint import keep_only, name_for, open_checkpoint, write_checkpoint
from invformer.runs.encoding import Spec
from invformer.runs.resume import DATA, follow_schedule, require_own_state
from invformer.runs.run_lock import require_lock

METADATA = "invformer"  # where a run puts what ``model.json`` says


class Checkpoints(L.Callback):
    """Saves at every validation and interruption; keeps the last two and the best (lowest bpc).

    Every checkpoint carries the name of the best one so far. Nothing is deleted before the
    checkpoint that replaces it was read back. A run that stops because a number is not finite, or
    because of a bug, leaves the checkpoints as they were. The module has ``make_optimizer``
    and ``make_schedule``.

    Args:
        folder: where the checkpoints go.
        previous: name of the checkpoint the run continues from.
    """

    def __init__(self, folder: Path, previous: str | None = None) -> None:
        self.folder = folder
        self.previous = previous
        self.best = math.inf
        self.best_name: str | None = None
        self.restored = False
        self.started = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on there is a state worth saving."""
        if self.restored:
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
        if isinstance(exception, Interrupted) and self.started:
            self.save(trainer, name_for(self.folder, trainer.global_step), {self.previous})

    def save(self, trainer: L.Trainer, name: str, kept: set[str | None]) -> None:
        """Write a checkpoint, read it back, and only then delete what is no longer needed.

        Args:
            trainer: whose state it is.
            name: of the new checkpoint.
            kept: names of checkpoints to keep besides the new and the best one.

        Raises:
            CheckpointError: another process may be at the run.
            StorageError: the folder cannot be written, or does not give back what was written.
        """
        require_lock(self.folder.parent)
        trainer.save_checkpoint(self.folder / name)  # all processes take part
        if trainer.is_global_zero:
            try:
                open_checkpoint(self.folder / name).verify()
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
        module: Any = pl_module
        fresh = module.make_optimizer(module.model)
        require_own_state(trainer, checkpoint, fresh, module.make_schedule(fresh))
        self.restored = True

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and where it is."""
        return {"best": self.best, "best_name": self.best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best value so far."""
        self.best, self.best_name = state_dict["best"], state_dict["best_name"]


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
            torch.cuda.set_rng_state_all(self._restored["cuda"][: torch.cuda.device_count()])


class DirectoryCheckpointIO(CheckpointIO):
    """Lightning's plugin for checkpoints as directories.

    Lightning hands over one nested dict, and gets the same one back, but for its own version: it
    has nothing to migrate.

    Args:
        wanted: the module's parameters and buffers, to which a file's weights are compared.
    """

    def __init__(self, wanted: Mapping[str, Spec]) -> None:
        self.wanted = wanted

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a directory; Lightning calls this in the first process only.

        Raises:
            NonFiniteError: the state is not finite; nothing is written.
            StorageError: it cannot be written; nothing is left of it.
        """
        state = dict(checkpoint)
        state["data"] = state.pop(DATA)
        metadata = {**state.pop(METADATA), "step": state.pop("global_step")}
        weights = state.pop("state_dict")
        del state["pytorch-lightning_version"]
        write_checkpoint(Path(path), metadata, weights, state)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a directory, verified, onto the CPU; ``weights_only`` means nothing here.

        Raises:
            CheckpointError: not a whole checkpoint of this module.
        """
        saved = open_checkpoint(Path(path))
        weights, state = saved.read_weights(self.wanted), saved.read_state()
        state[DATA] = state.pop("data")
        return {
            **state,
            METADATA: saved.metadata,
            "global_step": saved.step,
            "state_dict": weights,
            "pytorch-lightning_version": L.__version__,
        }

    def remove_checkpoint(self, path: Any) -> None:
        """Nobody asks for that: old checkpoints are pruned where they are written."""
        raise NotImplementedError
