"""Where a run may be stopped without losing anything, and how it goes on from there."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import lightning as L

from invformer.errors import Interrupted, InvformerError, RankLost
from invformer.processes import exit as ending
from invformer.processes.collective import ask_for_largest, largest_of_processes
from invformer.processes.ranks import hear_to_stop


@dataclass(eq=False)
class Interruption(L.Callback):
    """Turns SIGINT, SIGTERM and SIGHUP into an exception at the next safe place.

    Between two optimiser steps everything is whole: weights, optimiser, schedule, random generators
    and metrics belong together. A signal is therefore noted when it arrives (later ones change
    nothing, so that they do not disturb a save), and acted upon before the first batch of the next
    step or the next batch of a validation. Several processes agree on the one after that, and wait
    for nobody. Measurements that wait for their flush are checked first: the run that continues
    would never see them again.

    A validation that was stopped halfway is done again, from its beginning, before the first batch
    of the run that continues. This callback stands after all others, which have to be ready then.
    """

    # Looks at what was measured; raises if it must not be saved.
    check: Callable[[L.Trainer], object]
    again: str  # the command that continues the run
    signal: int = field(default=0, init=False)
    validating: bool = field(default=False, init=False)
    # Returns the largest signal that any process was sent, zero for none.
    asked: Callable[[], int] = field(default=int, init=False)

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
        """Stop, unless batches of the same step have drawn random numbers already."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_here(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that a validation has begun, for the run that continues if it is stopped."""
        self.validating = True

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Stop here too."""
        self._stop_here(trainer)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The checkpoint that follows is of a whole validation."""
        self.validating = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop for the last time; from here on no process waits for another."""
        self._stop_here(trainer)
        if trainer.world_size > 1:  # what was agreed right now
            self._stop_here(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Whether a validation is due."""
        return {"validating": self.validating}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.validating = state_dict["validating"]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _stop_here(self, trainer: L.Trainer) -> None:
        """Stop if any process was told to.

        Raises:
            Interrupted: naming the signal.
            InvformerError: the run has to end for a reason of its own, and nothing may be saved.
        """
        number = self.signal
        if trainer.world_size > 1:  # what was asked for before: nobody waits for the others
            asked, self.asked = self.asked, ask_for_largest(self.signal)
            number = asked()
        if number:
            check_everywhere(lambda: self.check(trainer))
            ending.stopping.acquire(blocking=False)  # signals from here on change nothing
            raise Interrupted(number, trainer.global_step, self.again)


def check_everywhere(check: Callable[[], object]) -> None:
    """Check in every process, and let all of them agree on what comes of it.

    If only one of them refused, the others would save a state, or wait for it while saving.

    Raises:
        InvformerError: what this process found.
        RankLost: all is in order here, but not in another process, which says what is wrong.
    """
    refusal: InvformerError | None = None
    try:
        check()
    except InvformerError as error:
        refusal = error
    if largest_of_processes(int(refusal is not None)):
        raise refusal or RankLost("another process refused what it had measured")
