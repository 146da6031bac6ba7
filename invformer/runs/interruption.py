"""Where a run may be stopped without losing anything, and how it goes on from there."""

import threading
from types import FrameType
from typing import Any

import lightning as L

from invformer.errors import CheckpointError, Interrupted, InvformerError, RankLost
from invformer.runs.collective import largest_of_processes
from invformer.runs.ranks import hear_to_stop, tell
from invformer.training.callbacks import Flush


class Interruption(L.Callback):
    """Turns SIGINT, SIGTERM and SIGHUP into an exception at the next safe place.

    SIGHUP, by which a terminal takes its leave, stays ignored where it is: under ``nohup``.

    Between two optimiser steps everything is whole: weights, optimiser, schedule, random generators
    and metrics belong together. A signal is therefore only noted when it arrives (once: later ones
    change nothing, so that what saves the state is not disturbed), and acted upon before the first
    batch of the next step, or the next batch of a validation. Several processes agree on that
    batch. What was measured and not looked at yet is checked first: the run that continues from
    here would never see it again.

    A validation that was stopped halfway is done again, from its beginning, when the run continues:
    before the first batch, as if nothing had happened. This callback stands after all others, since
    they have to be ready for that.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.validating = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the loop start even at the last step, whose validation may have to be done again."""
        trainer.fit_loop.epoch_loop.max_steps += 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note signals from here on, in place of Lightning's handlers; make up for a validation."""
        trainer.fit_loop.epoch_loop.max_steps -= 1
        if threading.current_thread() is threading.main_thread():
            hear_to_stop(self._note)
        if self.validating:
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.batch_progress.reset()
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A safe place, unless batches of the same step have drawn random numbers already."""
        if batch_idx % trainer.accumulate_grad_batches:
            tell(beat=True)
        else:
            self._stop_here(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Until all of it is done, it has to be done."""
        self.validating = True

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A safe place."""
        self._stop_here(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The checkpoint that follows is of a whole validation."""
        self.validating = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last safe place; from here on nobody waits for anybody."""
        self._stop_here(trainer, pl_module)
        tell(beat=False)

    def state_dict(self) -> dict[str, Any]:
        """Whether a validation is due."""
        return {"validating": self.validating}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            CheckpointError: it is not that.
        """
        self.validating = state_dict["validating"]
        if type(self.validating) is not bool:
            raise CheckpointError("whether a validation is due is neither true nor false")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _stop_here(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give a sign of life, and stop if any process was told to.

        Raises:
            Interrupted: naming the signal.
            InvformerError: the run has to end for a reason of its own, and nothing may be saved.
        """
        tell(beat=True)
        number = largest(trainer, self.signal)
        if number:
            refuse_pending(trainer, pl_module)
            raise Interrupted(number)


def refuse_pending(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Check the rows that wait for their flush; all processes agree on what comes of it.

    If only one of them refused, the others would save a state, or wait for it while saving.

    Raises:
        InvformerError: whatever is wrong with them.
        RankLost: they are in order here, but not in another process, which says what is wrong.
    """
    refusal: InvformerError | None = None
    try:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Flush):
                callback.flush_all(pl_module)
    except InvformerError as error:
        refusal = error
    if largest(trainer, int(refusal is not None)):
        raise refusal or RankLost("another process refused what it had measured")


def largest(trainer: L.Trainer, number: int) -> int:
    """The largest number that any process holds."""
    return number if trainer.world_size == 1 else largest_of_processes(number)
