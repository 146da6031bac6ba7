"""Local Lipschitz estimates during training, at every optimiser step."""

import logging
import time
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from invformer.config.schema import AlarmMode
from invformer.lipschitz.local_bounds import local_bounds
from invformer.lipschitz.probe import LipschitzProbe
from invformer.lipschitz.submodules import local_constants
from invformer.nn.certificate import NoCertificateError
from invformer.nn.proof import certify
from invformer.nn.stack import FoldedStackWeights
from invformer.runs.sharding import gathered
from invformer.training.alarm import Alarm
from invformer.training.module import CharLanguageModel
from invformer.training.rows import Numbers, record, rows_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LipschitzMonitor(L.Callback):
    """Local Lipschitz constants during training: of our models at every step, of others rarely.

    For a :class:`.CharLanguageModel` it estimates every branch at every optimiser step, with the
    weights before the step's update. The row of a step with a validation has estimates of the
    validated weights instead, and local bounds and bounds, which are proven, if there are theorems.
    For any other module it measures the submodules (:func:`.local_constants`), which takes far
    longer: choose ``every``.

    The monitor reads weights and writes metrics and its own buffers; training with and without it
    is bit-identical, it draws no random number outside a generator of its own, and no clock decides
    what it measures.

    Args:
        inputs: the probe text, (sequences, N), fixed for the run; for other models what they are
            called with: a tuple of arguments, a dictionary of keywords, or one tensor.
        every: optimiser steps between estimates.
        seed: of the start vectors.
        alarm: what :class:`.Alarm` does, if the trainer has none yet.

    Attributes:
        skipped: why submodules of other models are not measured.
    """

    inputs: Any
    _: KW_ONLY
    every: int = 1
    seed: int = 0
    alarm: AlarmMode = "off"
    probe: LipschitzProbe | None = field(default=None, init=False)
    skipped: dict[str, str] = field(default_factory=dict, init=False)
    restored: dict[str, Tensor] = field(default_factory=dict, init=False)
    # With CUDA graphs: the stream beside the backward pass, and the row until the step's update.
    beside: torch.cuda.Stream | None = field(default=None, init=False)
    early: Numbers = field(default_factory=dict, init=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Add the alarm; forget graphs of an earlier loop, which read its parameters' memory."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self.alarm != "off" and not any(isinstance(c, Alarm) for c in callbacks):
            rows_of(trainer)  # before the alarm, which acts on the rows that were sent
            callbacks.append(Alarm(self.alarm))
        if self.probe is not None:
            self.probe.replayed.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bind to the model on its device, and to the vectors of a checkpoint."""
        inputs = move_data_to_device(self.inputs, pl_module.device)
        self.inputs = trainer.precision_plugin.convert_input(inputs)  # as batches are
        self.watch = Stopwatch(pl_module.device)
        self.beside, self.early = None, {}
        if not isinstance(pl_module, CharLanguageModel):
            return
        if replays := pl_module.replays:
            self.beside = torch.cuda.Stream()
        self.probe = LipschitzProbe(pl_module.model, self.inputs, seed=self.seed, replays=replays)
        places = [*(f"lipschitz_branches/{name}" for name in self.probe.names), "lipschitz"]
        columns = ("estimate", "local_bound", "bound")
        self.keys = {column: tuple(f"{p}/{column}" for p in places) for column in columns}
        if self.restored:
            try:
                self.probe.load_state_dict(self.restored)
            except ValueError as error:  # monitor.length, for one, was changed
                log.warning("%s: estimates start anew", error)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """If steps are CUDA graphs, estimate beside the backward pass, which changes no weight."""
        if self.beside is None or trainer.global_step % self.every:
            return
        assert isinstance(pl_module, CharLanguageModel)
        if not pl_module.replays:
            return
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self.early = self.row(pl_module.weights)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Estimate with the weights that the training step has used."""
        step = trainer.global_step
        if step % self.every:
            return
        if not isinstance(pl_module, CharLanguageModel):
            record(trainer, step, self.of_submodules(pl_module))
        elif self.early and self.beside is not None:
            with self.watch:  # how long training waits for it
                torch.cuda.current_stream().wait_stream(self.beside)
            record(trainer, step, self.early)
            self.early = {}
        else:
            with self.watch, gathered(pl_module.model):
                record(trainer, step, self.row(pl_module.weights))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the validation out of the time that the monitor's is compared with."""
        if self.probe is not None:
            self.stopped = self.watch.mark()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Estimate and bound with the validated weights; the next step's vectors stay the same."""
        if self.probe is None:
            return
        assert isinstance(pl_module, CharLanguageModel)
        step = pl_module.step
        with self.watch, torch.inference_mode(False), self.probe.unchanged():
            record(trainer, step, self.row(None) | self.proven(self.probe))
        if (share := self.watch.share(self.stopped)) is not None:
            record(trainer, step, {"perf/monitor_overhead": share})

    def of_submodules(self, model: nn.Module) -> Numbers:
        """The local constant of every submodule of another model."""
        arguments = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        found = local_constants(model, *arguments)
        if found.skipped != self.skipped:
            self.skipped = found.skipped
            counts = Counter(self.skipped.values()).items()
            reasons = "; ".join(f"{why} ({count})" for why, count in counts)
            rank_zero_info(f"the Lipschitz monitor skips modules, see its `skipped`: {reasons}")
        return {f"lipschitz/{name or 'whole'}": value for name, value in found.values.items()}

    def row(self, weights: FoldedStackWeights | None) -> Numbers:
        """Estimates, as a vector on the device, and the target; None computes the weights."""
        assert self.probe is not None
        row = self.by_key("estimate", self.probe.values(weights))
        if self.probe.model.is_invertible:
            row["lipschitz/target"] = self.probe.target
        return row

    def proven(self, probe: LipschitzProbe) -> Numbers:
        """Local bounds and bounds of the branches, if there is a theorem for each of them."""
        try:
            per_branch = certify(probe.model).per_branch
        except NoCertificateError:
            return {}
        found = local_bounds(probe)
        bounds = found.new_tensor([per_branch[name] for name in probe.names])
        local = torch.minimum(found, bounds)  # what holds everywhere holds here
        return self.by_key("local_bound", local) | self.by_key("bound", bounds)

    def by_key(self, column: str, values: Tensor) -> Numbers:
        """A constant of every branch, and the largest of them, by their keys in metrics.jsonl."""
        return {self.keys[column]: torch.cat([values, values.amax(0, keepdim=True)])}

    def state_dict(self) -> dict[str, Any]:
        """The probe's buffers: a resumed run continues its estimates to the bit."""
        return self.restored if self.probe is None else self.probe.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a checkpoint's buffers."""
        self.restored = state_dict


class Stopwatch:
    """Times what runs inside ``with watch:`` by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.began = self.mark()

    def __exit__(self, *error: object) -> None:
        self.spans.append((self.began, self.mark()))

    def mark(self) -> Any:
        """Now, as the device will see it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two marks."""
        return began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began

    def share(self, until: Any) -> float | None:
        """Seconds inside over seconds outside since the last call; None after one span.

        The time outside begins with the end of the first span, and ends at a mark before the last.
        """
        spans, self.spans = self.spans, []
        if len(spans) < 2:
            return None
        if self.on_gpu:
            spans[-1][1].synchronize()  # the rows that are sent now wait for it anyway
        first, *others, last = spans
        inside = sum(self.seconds(*span) for span in others)
        outside = self.seconds(first[1], until) - inside
        return (inside + self.seconds(*last)) / outside if outside > 0 else None
