"""Local Lipschitz estimates during training, after every optimiser step."""

from typing import Any

import lightning as L
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CheckpointError
from invformer.lipschitz.local_bounds import local_bounds
from invformer.lipschitz.probe import LipschitzProbe
from invformer.runs.run_log import Measured, RunLog
from invformer.training.callbacks import is_last_step, is_step_boundary
from invformer.training.module import CharLanguageModel
from invformer.training.stopwatch import Stopwatch


class LipschitzMonitor(L.Callback):
    """Estimates of every branch after every optimiser step, local bounds before validations.

    Numbers of a row refer to the weights after the step. The monitor reads weights and writes
    metrics and its own buffers; training with and without it is bit-identical, it draws no random
    number outside a generator of its own, and no clock decides what it measures.

    Args:
        tokens: the probe text, (sequences, N), fixed for the run.
        run_log: where the rows go.
        every: optimiser steps between estimates.
        local_every: optimiser steps between local bounds, those that a validation follows; the last
            step of a run is one of them. There the estimate is at inputs that are up to date.
        seed: of the start vectors.
    """

    def __init__(
        self,
        tokens: Integer[Tensor, "sequences tokens"],
        run_log: RunLog,
        *,
        every: int = 1,
        local_every: int = 250,
        seed: int = 0,
    ) -> None:
        self.tokens, self.run_log = tokens, run_log
        self.every, self.local_every, self.seed = every, local_every, seed
        self.probe: LipschitzProbe | None = None
        self.restored: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bind to the model on its device, and to the vectors of a checkpoint."""
        assert isinstance(pl_module, CharLanguageModel)
        tokens = self.tokens.to(pl_module.device)
        self.watch = Stopwatch(pl_module.device)
        self.probe = LipschitzProbe(pl_module.model, tokens, seed=self.seed)
        if self.restored:
            try:
                self.probe.load_state_dict(self.restored)
            except ValueError as error:
                raise CheckpointError(f"the Lipschitz monitor: {error}") from None

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record what is due after this step."""
        if not is_step_boundary(trainer):
            return
        step = trainer.global_step - 1
        validates = (step + 1) % self.local_every == 0 or is_last_step(trainer)
        if validates or step % self.every == 0:
            with self.watch:
                self.run_log.record(step, self.row(validates))
        if validates and (share := self.watch.share()) is not None:
            self.run_log.record(step, {"perf/monitor_overhead": share})

    def row(self, with_local_bounds: bool) -> Measured:
        """One step's metrics, in one vector on the device."""
        assert self.probe is not None
        names = self.probe.names
        columns = {"estimate": self.probe.values(settled=with_local_bounds).double()}
        if self.probe.model.is_invertible:
            if with_local_bounds:
                columns["local_bound"] = local_bounds(self.probe)
            columns["bound"] = self.probe.bounds()
        keys = [f"lipschitz_branches/{name}/{key}" for key in columns for name in names]
        keys += [f"lipschitz/{key}" for key in columns]
        table = torch.stack(list(columns.values()))
        row: Measured = {tuple(keys): torch.cat([table.flatten(), table.amax(-1)])}
        if self.probe.model.is_invertible:
            row["lipschitz/target"] = self.probe.target
        return row

    def state_dict(self) -> dict[str, Any]:
        """The probe's buffers: a resumed run continues its estimates to the bit."""
        return self.restored if self.probe is None else self.probe.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a checkpoint's buffers."""
        self.restored = state_dict
