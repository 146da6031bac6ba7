"""When to measure, and on what. The mathematics is in nn/, numerics/ and evaluation/."""

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CertificateViolation, NonFiniteError
from invformer.evaluation.inversion import invert_text
from invformer.evaluation.lipschitz import require_sandwich
from invformer.nn.certificate import Certificate, enforce
from invformer.runs.files import replace_file
from invformer.runs.interruption import largest
from invformer.runs.run_log import Row, RunLog
from invformer.runs.saving import METADATA
from invformer.runs.sharding import is_sharded
from invformer.training.module import CharLanguageModel, non_finite


class Flush(L.Callback):
    """Sends the collected metrics on, every few steps and whenever the loop pauses.

    This is where the host waits for the device, so it is also where values are checked.

    Args:
        run_log: what to flush.
        every: optimiser steps between flushes.
        characters_per_step: for the throughput metric.
        evidence: where to write the row and the probe text if a bound turns out to be violated.
        probe: the text the estimates are for.
    """

    def __init__(
        self,
        run_log: RunLog,
        every: int,
        characters_per_step: int,
        evidence: Path,
        probe: Integer[Tensor, "sequences tokens"] | None = None,
    ) -> None:
        self.run_log = run_log
        self.evidence = evidence
        self.probe = probe
        self.every = every
        self.characters_per_step = characters_per_step
        self._since = 0.0
        self._steps = 0

    def flush(self, before: int | None = None) -> None:
        """Send the pending rows before a step (or all of them), checked."""
        for step, row in self.run_log.flush(before).items():
            check_finite(step, row)
            try:
                check_sandwich(step, row)
            except CertificateViolation as violation:
                self.keep_evidence(step, row)
                raise CertificateViolation(f"{violation} (evidence in {self.evidence})") from None

    def flush_all(self, pl_module: L.LightningModule) -> None:
        """Send everything, so that nothing unchecked is ever saved as a checkpoint."""
        refuse_lost_update(pl_module)
        self.flush()

    def keep_evidence(self, step: int, row: Row) -> None:
        """Write down what disproved a bound: the step's metrics and the text they belong to."""
        tokens = None if self.probe is None else self.probe.tolist()
        content = json.dumps({"step": step, "row": row, "probe": tokens}, indent=1)
        replace_file(self.evidence, content + "\n")

    def record_throughput(self, trainer: L.Trainer) -> None:
        """Record the rate since the clock was started, and restart it."""
        if self._steps:
            elapsed = time.perf_counter() - self._since
            rate = self._steps * self.characters_per_step / elapsed
            self.run_log.record(trainer.global_step - 1, {"perf/characters_per_second": rate})
        self._since = time.perf_counter()
        self._steps = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock with the first batch and after every pause."""
        if self._steps == 0:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Flush every few optimiser steps; the newest row waits for a validation to join it."""
        if is_step_boundary(trainer):
            self._steps += 1
            if self._steps >= self.every:
                self.record_throughput(trainer)
                refuse_lost_update(pl_module)
                self.flush(before=trainer.global_step - 1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock while the validation takes its time."""
        self.record_throughput(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send everything: a checkpoint follows."""
        self.flush_all(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send the rest."""
        self.flush_all(pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Send what there is, unchecked: a second failure must not hide the first.

        After an interruption, which saves, there is nothing left (``training.interruption``).
        """
        self.run_log.flush()


class CertificateKeeper(L.Callback):
    """Certifies the model before every validation, and holds it to its target.

    The latest certificate is written to ``certificate.json`` of the run.

    Args:
        path: where to write the latest certificate.
        run_log: where the bounds go.
        dtype: precision of the forward pass, to which weights are cast before they are certified.
    """

    def __init__(self, path: Path, run_log: RunLog, dtype: torch.dtype) -> None:
        self.path = path
        self.run_log = run_log
        self.dtype = dtype
        self.certificate: Certificate | None = None
        self.certified_at = -1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Certify; shrink what exceeds its target; refuse to go on if that fails."""
        assert isinstance(pl_module, CharLanguageModel)
        try:
            self.certificate = enforce(pl_module.model, self.dtype)
            self.certified_at = trainer.global_step
        except NonFiniteError as error:
            raise non_finite(pl_module.step, str(error)) from None
        if not self.certificate.holds:
            raise CertificateViolation(
                f"step {pl_module.step}: certified {self.certificate.norm} bound "
                f"{self.certificate.bound_max} exceeds its target {self.certificate.target}"
            )
        if trainer.is_global_zero:
            content = json.dumps(self.certificate.to_dict(), indent=2) + "\n"
            replace_file(self.path, content)
        self.run_log.record(
            pl_module.step,
            {"lipschitz/certified": self.certificate.bound_max},
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the certificate beside the weights it is of, never beside later ones."""
        if self.certificate is not None and self.certified_at == trainer.global_step:
            checkpoint.setdefault(METADATA, {})["certificate"] = self.certificate.to_dict()


class InversionMonitor(L.Callback):
    """Inverts a few validation sequences at every validation, in float64 as evaluate.py does.

    The weights are those of the run. Under FSDP2, whose modules cannot be copied, it is in their
    precision. Characters are proven by evaluate.py, which takes longer.

    Args:
        tokens: the text to invert, (sequences, N).
        run_log: where the report goes.
        keeper: holds the certificate the error bounds rest on.
    """

    def __init__(
        self,
        tokens: Integer[Tensor, "sequences tokens"],
        run_log: RunLog,
        keeper: CertificateKeeper,
    ) -> None:
        self.tokens = tokens
        self.run_log = run_log
        self.keeper = keeper

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Push the text up, bring it down, record how well that went."""
        assert isinstance(pl_module, CharLanguageModel)
        if self.keeper.certificate is None:
            return
        weight = next(pl_module.parameters())
        dtype = weight.dtype if is_sharded(pl_module.model) else torch.float64
        with torch.autocast(pl_module.device.type, enabled=False):
            _, report = invert_text(
                pl_module.model,
                self.tokens.to(pl_module.device),
                self.keeper.certificate,
                dtype=dtype,
                prove=False,
            )
        self.run_log.record(
            pl_module.step,
            {
                "inverse/residual_max": report.residual,
                "inverse/error_bound_max": report.error_bound,
                "inverse/reconstruction_max": report.reconstruction_error,
                "inverse/num_steps_mean": sum(report.num_steps.values()) / len(report.num_steps),
                "inverse/converged_fraction": report.converged_fraction,
                "inverse/characters_recovered": report.characters_recovered,
            },
        )


class LastValidation(L.Callback):
    """Validates, and so saves, after the last step, wherever that is between two validations.

    Args:
        max_seconds: of training, after which a step is the last one for now; None is no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.max_seconds = max_seconds
        self.start = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, anew when a run continues."""
        self.start = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Ask for the end, before which Lightning validates; at its own limit it does not."""
        is_last = is_last_step(trainer)
        if self.max_seconds is not None and is_step_boundary(trainer):
            is_over = time.monotonic() - self.start >= self.max_seconds
            is_last = is_last or bool(largest(trainer, int(is_over)))
        trainer.should_stop = trainer.should_stop or is_last


def is_step_boundary(trainer: L.Trainer) -> bool:
    """Whether the batch that just ended also ended an optimiser step."""
    return not trainer.fit_loop._should_accumulate()


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether all optimiser steps of the run are done."""
    return trainer.global_step >= trainer.max_steps


def refuse_lost_update(pl_module: L.LightningModule) -> None:
    """Whether an update was skipped since the last flush; see the module's method."""
    assert isinstance(pl_module, CharLanguageModel)
    pl_module.refuse_lost_update()


def check_finite(step: int, row: Row) -> None:
    """Stop on a loss or gradient that is no number, naming both.

    Raises:
        NonFiniteError: naming the step and the metric.
    """
    for key in ("train/nats", "optim/grad_norm"):
        if key in row and not math.isfinite(row[key]):
            raise non_finite(step, f"{key} is {row[key]}")


def check_sandwich(step: int, row: Row) -> None:
    """estimate ≤ local bound ≤ bound for every branch.

    Raises:
        CertificateViolation: naming step, branch and both numbers.
    """
    for key in row:
        if key.startswith("lipschitz_branches/") and key.endswith("/estimate"):
            where = key.removesuffix("/estimate")
            values = {k: row.get(f"{where}/{k}") for k in ("estimate", "local_bound", "bound")}
            require_sandwich(f"step {step}: {where}", values)
