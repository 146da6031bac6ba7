"""Local Lipschitz estimates during training, of any model."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from invformer.config.schema import AlarmMode
from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.training.alarm import Alarm
from invformer.training.branch_monitor import BranchMonitor
from invformer.training.module import CharLanguageModel
from invformer.training.rows import record, rows_of


@dataclass(eq=False)
class LipschitzMonitor(L.Callback):
    """Local Lipschitz constants during training, of the submodules of any model.

    The trainer's loggers get ``lipschitz/SUBMODULE`` of each of them (:class:`.SubmoduleProbe`). A
    :class:`.CharLanguageModel` is measured branch by branch instead (:class:`.BranchMonitor`),
    which is faster: at every step, in our runs. Other models: choose ``every``.

    The monitor reads weights and writes metrics and its own buffers; training with and without it
    is bit-identical, it draws no random number outside a generator of its own, and no clock decides
    what it measures.

    Args:
        inputs: what the model is called with: a tuple of arguments, a dictionary of keywords, or
            one tensor; for our models the probe text, (sequences, N). Fixed for the run.
        every: optimiser steps between estimates.
        seed: of the start vectors.
        alarm: what :class:`.Alarm` does, if the trainer has none yet.
        name: begins the keys of what is logged; monitors of one trainer need different names. The
            alarm watches those called ``lipschitz``.
    """

    inputs: Any
    _: KW_ONLY
    every: int = 1
    seed: int = 0
    alarm: AlarmMode = "off"
    name: str = "lipschitz"
    watched: "BranchMonitor | SubmoduleMonitor | None" = field(default=None, init=False)
    restored: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def state_key(self) -> str:
        """Where checkpoints keep its state."""
        own = type(self).__qualname__
        return own if self.name == "lipschitz" else f"{own}/{self.name}"

    @property
    def notes(self) -> dict[str, str]:
        """What is done in another way while submodules are measured."""
        return self.watched.probe.notes if isinstance(self.watched, SubmoduleMonitor) else {}

    @property
    def skipped(self) -> dict[str, str]:
        """Why submodules are not measured."""
        return self.watched.probe.skipped if isinstance(self.watched, SubmoduleMonitor) else {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Add the alarm; forget graphs of an earlier loop, which read its parameters' memory."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self.alarm != "off" and not any(isinstance(c, Alarm) for c in callbacks):
            rows_of(trainer)  # before the alarm, which acts on the rows that were sent
            callbacks.append(Alarm(self.alarm))
        if isinstance(self.watched, BranchMonitor):
            self.watched.probe.replayed.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bind to the model on its device, and to the vectors of a checkpoint."""
        inputs = move_data_to_device(self.inputs, pl_module.device)
        inputs = trainer.precision_plugin.convert_input(inputs)  # as batches are
        is_ours = isinstance(pl_module, CharLanguageModel)
        kind = BranchMonitor if is_ours else SubmoduleMonitor
        self.watched = kind(pl_module, inputs, self.seed, self.restored, self.name)  # type: ignore[arg-type]

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Begin early where that is faster."""
        if isinstance(self.watched, BranchMonitor) and trainer.global_step % self.every == 0:
            self.watched.before_backward()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Estimate with the weights before the update."""
        if self.watched is not None and trainer.global_step % self.every == 0:
            self.watched.estimate(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop a stopwatch."""
        if isinstance(self.watched, BranchMonitor):
            self.watched.validation_starts()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bounds of the validated weights."""
        if isinstance(self.watched, BranchMonitor):
            self.watched.validate(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The probe's buffers: a resumed run continues its estimates to the bit."""
        return self.restored if self.watched is None else self.watched.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a checkpoint's buffers."""
        self.restored = state_dict


class SubmoduleMonitor:
    """What :class:`LipschitzMonitor` does with any model that is not ours."""

    def __init__(
        self, module: nn.Module, inputs: Any, seed: int, restored: dict[str, Any], name: str
    ) -> None:
        self.probe, self.name = SubmoduleProbe(module, inputs, seed), name
        self.measured_at = -1
        if restored:
            self.probe.load_state_dict(restored)

    def estimate(self, trainer: L.Trainer) -> None:
        """Record the local constant of every submodule; say once which have none."""
        if trainer.global_step == self.measured_at:  # closures of L-BFGS
            return
        is_first, self.measured_at = self.measured_at < 0, trainer.global_step
        with unlogged(self.probe.model):
            gains = self.probe.gains()
        keys = tuple(f"{self.name}/{name or 'whole'}" for name in gains)
        if keys:
            values = torch.stack([gain.double() for gain in gains.values()])
            record(trainer, trainer.global_step, {keys: values})
            # For Lightning's EarlyStopping and ModelCheckpoint, which see what they watch here.
            trainer.callback_metrics.update(zip(keys, values, strict=True))
        for name, said in {"skipped": "skips modules", "notes": "measures modules with"}.items():
            if is_first and (held := getattr(self.probe, name)):
                counts = Counter(held.values()).items()
                reasons = "; ".join(f"{why} ({count})" for why, count in counts)
                rank_zero_info(f"the Lipschitz monitor {said}, see its `{name}`: {reasons}")

    def state_dict(self) -> dict[str, Any]:
        """The probe's vectors."""
        return self.probe.state_dict()


@contextmanager
def unlogged(model: nn.Module) -> Iterator[None]:
    """What forward methods log is not logged: it would count as a value of the training batch."""
    modules = [each for each in model.modules() if isinstance(each, L.LightningModule)]
    for module in modules:
        vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
    try:
        yield
    finally:
        for module in modules:
            del module.log, module.log_dict
