"""Metrics of a run: one row per optimiser step, kept on the device and logged now and then."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Integer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.evaluation.lipschitz import require_sandwich
from invformer.report.plots import picture_of
from invformer.runs.files import replace_file
from invformer.runs.run_log import Row, by_branch

# What may be recorded: a scalar by its key, or a vector by the keys of its entries; the largest of
# them has the last key if there is one more.
Numbers = dict[str | tuple[str, ...], Tensor | float]


def record(trainer: L.Trainer, step: int, values: Numbers) -> None:
    """Remember numbers of one optimiser step (detached tensors on any device, or floats).

    Nothing waits for the device. A trainer without :class:`Rows` gets one.
    """
    if not trainer.sanity_checking:
        rows_of(trainer).pending.setdefault(step, {}).update(values)


def log_table(trainer: L.Trainer, key: str, columns: list[str], data: list[list[Any]]) -> None:
    """Show text in W&B and TensorBoard, at the last optimiser step."""
    if trainer.sanity_checking:
        return
    step = trainer.global_step - 1
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(key, columns, data, step=step)
        elif isinstance(logger, TensorBoardLogger):
            lines = [columns, ["---"] * len(columns), *data]
            text = "\n".join(" | ".join(map(str, line)) for line in lines)
            logger.experiment.add_text(key, text, step)


def rows_of(trainer: L.Trainer) -> "Rows":
    """The callback that collects a trainer's rows, which is added if there is none."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = next((c for c in callbacks if isinstance(c, Rows)), None)
    if found is None:
        callbacks.append(found := Rows())
    return found


@dataclass(eq=False)
class Rows(L.Callback):
    """Collects numbers of every step, and sends complete rows to each of the trainer's loggers.

    A log point comes every few steps and whenever the loop pauses. It is where the host waits for
    the device, so it is also where values are checked. Rows leave in the order of their steps.
    """

    every: int = 25  # optimiser steps between log points
    evidence: Path | None = None  # where to write the row and the probe if a bound is violated
    probe: Integer[Tensor, "sequences tokens"] | None = None  # the text the estimates are for
    pending: dict[int, Numbers] = field(default_factory=dict)
    # Called with (step, row) for every row that is sent.
    listeners: list[Callable[[int, Row], None]] = field(default_factory=list)

    def flush(self, trainer: L.Trainer, before: int | None = None) -> dict[int, Row]:
        """Send pending rows to the trainer's loggers; the only place that waits for the device.

        Rows from the step ``before`` on are kept, because more may come for them.
        """
        complete = {s: r for s, r in self.pending.items() if before is None or s < before}
        self.pending = {s: r for s, r in self.pending.items() if s not in complete}
        rows = to_host(complete)
        for step in sorted(rows):
            for listener in self.listeners:
                listener(step, rows[step])
            for logger in trainer.loggers:
                logger.log_metrics(rows[step], step)
                if isinstance(logger, WandbLogger) and "lipschitz/local_bound" in rows[step]:
                    logger.log_image("view/constants", [picture_of(rows[step])], step)
        return rows

    def send(self, trainer: L.Trainer, before: int | None = None) -> dict[int, Row]:
        """Send the pending rows before a step (or all), if estimates are below bounds and targets.

        A loss or gradient that is not finite is refused by the module, which can say what it was.
        """
        refuse = getattr(trainer.lightning_module, "refuse_lost_update", None)
        if refuse is not None:
            refuse()
        rows = self.flush(trainer, before)
        for step, row in rows.items():
            try:
                for name, constants in by_branch(row).items():
                    held = {"target": row.get("lipschitz/target"), **constants}
                    require_sandwich(f"step {step}: lipschitz_branches/{name}", held)
            except CertificateViolation as violation:
                if self.evidence is None:
                    raise
                tokens = None if self.probe is None else self.probe.tolist()
                content = json.dumps({"step": step, "row": row, "probe": tokens}, indent=1)
                replace_file(self.evidence, content + "\n")
                raise CertificateViolation(f"{violation} (evidence in {self.evidence})") from None
        return rows

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Send rows every few steps; the newest one waits for a validation to join it."""
        if trainer.global_step % self.every == 0 and is_step_boundary(trainer):
            self.send(trainer, before=trainer.global_step - 1)
            self.save(trainer)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send everything. What the module logs of the validation follows; then a checkpoint.

        Callbacks of Lightning may watch the numbers of the newest step.
        """
        rows = self.send(trainer)
        if rows:
            for key, value in rows[max(rows)].items():
                trainer.callback_metrics[key] = torch.tensor(value, dtype=torch.float64)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send the rest."""
        self.send(trainer)
        self.save(trainer)

    def on_exception(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Send what there is, unchecked: a second failure must not hide the first."""
        self.flush(trainer)
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Have the loggers write what they hold back."""
        for logger in trainer.loggers:
            logger.save()


def to_host(pending: Mapping[int, Numbers]) -> dict[int, Row]:
    """The same rows as floats, with one device-to-host copy for all tensors together."""
    rows: dict[int, Row] = {step: {} for step in pending}
    places: list[tuple[int, str]] = []
    tensors: list[Tensor] = []
    for step, row in pending.items():
        for key, value in row.items():
            keys = (key,) if isinstance(key, str) else key
            if isinstance(value, Tensor):
                places += [(step, name) for name in keys]
                value = value.detach().double().flatten()
                has_largest = len(keys) > len(value)
                tensors += [value, value.amax(0, keepdim=True)] if has_largest else [value]
            else:
                rows[step] |= {name: float(value) for name in keys}
    values = torch.cat(tensors).tolist() if tensors else []
    for (step, key), value in zip(places, values, strict=True):
        rows[step][key] = value
    return rows


def is_step_boundary(trainer: L.Trainer) -> bool:
    """Whether the batch that just ended also ended an optimiser step."""
    num_batches = trainer.fit_loop.epoch_loop.batch_idx + 1
    return num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
