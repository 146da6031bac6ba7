"""What a run saves and when, and how Lightning's checkpoints become directories and back."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from invformer.errors import CheckpointError, Interrupted, StorageError
from invformer.processes.contained import in_background
from invformer.runs.checkpoint import (
    CHANGES,
    encode,
    keep_only,
    name_for,
    open_checkpoint,
    write_directory,
)
from invformer.runs.files import require_lock
from invformer.runs.resume import (
    follow_schedule,
    require_own_state,
    take_settings,
)

GRACE = 60.0  # seconds for writing the last checkpoint of a run that fails
DATA = "TextDataModule"  # Lightning's key for the sampler's position
METADATA = "invformer"  # where a run puts what ``model.json`` says


@dataclass(eq=False)
class Checkpoints(L.Callback):
    """Saves at every validation and interruption; keeps the last two and the best (lowest bpc).

    Training goes on while files are written; the next save, an interruption and the end wait for
    that. Every checkpoint carries the name of the best one so far. Nothing is deleted before the
    checkpoint that replaces it was read back. A run that stops because a number is not finite, or
    because of a bug, leaves the checkpoints as they were. The module has ``make_optimizer``
    and ``make_schedule``.
    """

    folder: Path
    previous: str | None = None  # name of the checkpoint from which the run continues
    patience: int | None = None  # validations without a better one after which the run ends
    best: float = field(default=math.inf, init=False)
    best_name: str | None = field(default=None, init=False)
    num_worse: int = field(default=0, init=False)  # validations since the best one
    started: bool = field(default=False, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on there is a state worth saving."""
        moved = follow_schedule(trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)
        if moved and trainer.is_global_zero:
            print(f"on the schedule of the new settings {' and '.join(moved)}")
        self.started = True
        trainer.should_stop = self.is_over

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what was just validated (the metrics were flushed, hence checked, before)."""
        self.wait(trainer)
        bpc = float(trainer.callback_metrics["val/bpc"])
        name = name_for(self.folder, trainer.global_step)
        kept = {self.previous, self.best_name}  # the previous one names the best so far
        self.num_worse += 1
        if bpc < self.best:
            self.best, self.best_name, self.num_worse = bpc, name, 0
        self.save(trainer, name, kept)
        trainer.should_stop = trainer.should_stop or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the patience of the run has come to its end; the same in all processes."""
        return self.patience is not None and self.num_worse >= self.patience

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save the state at an interruption, from which the same command continues."""
        if isinstance(exception, Interrupted) and self.started:
            self.wait(trainer)
            self.save(trainer, name_for(self.folder, trainer.global_step), {self.previous})
            self.wait(trainer)
        else:  # let what is being written become whole, but wait for no process that is gone
            io: Any = trainer.strategy.checkpoint_io
            with suppress(StorageError, TimeoutError):
                io.wait(GRACE)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last checkpoint is whole before :class:`.Interruption` stops for the last time."""
        self.wait(trainer)

    def wait(self, trainer: L.Trainer) -> None:
        """Wait until all processes have written what was saved before; raises StorageError."""
        io: Any = trainer.strategy.checkpoint_io
        io.wait()
        trainer.strategy.barrier()

    def save(self, trainer: L.Trainer, name: str, kept: set[str | None]) -> None:
        """Begin to write a checkpoint, after which only it, the best and ``kept`` ones stay."""
        require_lock(self.folder.parent)
        trainer.save_checkpoint(self.folder / name, storage_options={name, self.best_name, *kept})
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
        schedule = module.make_schedule(fresh)
        changes = module.metadata.get(CHANGES)
        if changes and changes[-1]["step"] == checkpoint["global_step"]:
            take_settings(checkpoint, fresh, schedule)
        require_own_state(trainer, checkpoint, fresh, schedule)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, where it is, and how many were validated since."""
        names = "best", "best_name", "num_worse"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on comparing with the best value so far."""
        self.best, self.best_name = state_dict["best"], state_dict["best_name"]
        self.num_worse = state_dict.get("num_worse", 0)  # which earlier releases did not count


class RandomState(L.Callback):
    """Carries the random generators' states in the checkpoint, which Lightning leaves out."""

    _restored: dict[str, Any] | None = None

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


@dataclass(eq=False)
class DirectoryCheckpointIO(CheckpointIO):
    """Lightning's plugin for checkpoints as directories, which a thread writes.

    Lightning gets back the nested dict that it handed over, with its present version, so that it
    migrates nothing.
    """

    wanted: Mapping[str, Tensor]  # the module's weights, with which those of a file are compared
    writing: Future[None] | None = field(default=None, init=False)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Copy the state, and begin to write it.

        Lightning calls this in the first process only.
        ``storage_options`` are the names of the checkpoints to keep; None keeps all.

        Raises:
            NonFiniteError: the state is not finite; nothing is written.
        """
        state = dict(checkpoint)
        state["data"] = state.pop(DATA)
        metadata = {**state.pop(METADATA), "step": state.pop("global_step")}
        weights = state.pop("state_dict")
        del state["pytorch-lightning_version"]
        files = encode(metadata, weights, state)

        def write() -> None:
            write_directory(Path(path), files)
            try:
                open_checkpoint(Path(path)).verified()
                if storage_options is not None:
                    keep_only(Path(path).parent, storage_options)
            except CheckpointError as error:
                raise StorageError(f"just written, and not read back: {error}") from None
            except OSError as error:
                raise StorageError(f"{path}: cannot delete ({error.strerror})") from error

        self.writing = in_background(write, "checkpoint")

    def wait(self, seconds: float | None = None) -> None:
        """Wait until everything is written and read back; raises StorageError, TimeoutError."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result(seconds)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a directory, verified, onto the CPU; raises CheckpointError."""
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
