"""When to measure, and on what. The mathematics is in nn/, numerics/ and evaluation/."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.data.tokens import unknown_rate
from invformer.errors import CertificateViolation, NonFiniteError
from invformer.evaluation.inversion import round_trip
from invformer.nn.certificate import Certificate
from invformer.nn.proof import enforce
from invformer.numerics.precision import without_autocast
from invformer.processes.collective import largest_of_processes
from invformer.runs.files import write_json
from invformer.runs.saving import METADATA
from invformer.training.module import CharLanguageModel
from invformer.training.rows import Numbers, is_step_boundary, log_table, record


@dataclass(eq=False)
class Speed(L.Callback):
    """Records characters per second every few optimiser steps, validations left out."""

    every: int  # optimiser steps
    characters: int = field(default=0, init=False)
    since: float | None = field(default=None, init=False)  # None: the clock stands still

    def on_train_start(self, *_: Any, **__: Any) -> None:
        """Nothing is counted yet."""
        self.characters, self.since = 0, None

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Start the clock with the first batch, and again after a validation."""
        if self.since is None:
            self.since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and record every few optimiser steps."""
        self.characters += batch[0].numel() * trainer.world_size
        if trainer.global_step % self.every == 0 and is_step_boundary(trainer):
            self.record(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record, so that the clock stands still until training goes on."""
        self.record(trainer)
        self.since = None

    def record(self, trainer: L.Trainer) -> None:
        """Record the rate since the last record; waiting for a GPU afterwards is the next one's."""
        now = time.perf_counter()
        if self.characters and self.since is not None:
            rate = self.characters / (now - self.since)
            record(trainer, trainer.global_step - 1, {"perf/characters_per_second": rate})
        self.characters, self.since = 0, now


@dataclass(eq=False)
class CertificateKeeper(L.Callback):
    """Certifies the model before every validation, and holds it to its target."""

    path: Path | None = None  # where to write the latest certificate
    # Precision of the forward pass, in which weights are certified; None for their own.
    dtype: torch.dtype | None = None
    certificate: Certificate | None = field(default=None, init=False)
    certified_at: int = field(default=-1, init=False)  # step

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Certify; shrink what exceeds its target; refuse to go on if that fails."""
        assert isinstance(pl_module, CharLanguageModel)
        try:
            self.certificate = enforce(pl_module.model, self.dtype)
            self.certified_at = trainer.global_step
        except NonFiniteError as error:
            raise NonFiniteError.at(pl_module.step, str(error)) from None
        if not self.certificate.holds:
            raise CertificateViolation(
                f"step {pl_module.step}: certified {self.certificate.norm} bound "
                f"{self.certificate.bound_max} exceeds its target {self.certificate.target}"
            )
        if self.path is not None and trainer.is_global_zero:
            write_json(self.certificate.to_dict(), self.path)
        record(trainer, pl_module.step, {"lipschitz/bound": self.certificate.bound_max})
        norm, targets = self.certificate.norm, self.certificate.targets
        bounds = self.certificate.per_branch.items()
        rows = [[name, norm, bound, targets[name]] for name, bound in bounds]
        log_table(trainer, "view/certificate", ["branch", "norm", "bound", "target"], rows)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the certificate with the weights that it holds for, never with later ones."""
        if self.certificate is not None and self.certified_at == trainer.global_step:
            checkpoint.setdefault(METADATA, {})["certificate"] = self.certificate.to_dict()


@dataclass(eq=False)
class InversionMonitor(L.Callback):
    """Inverts a few validation sequences at every validation, in float64 as evaluate.py does."""

    tokens: Integer[Tensor, "sequences tokens"]  # the text to invert
    decode: Callable[[Tensor], str] | None = None  # makes text of tokens, to show it

    @property
    def caveat(self) -> str:
        """What belongs beside the share that is recovered: how much of it is one symbol."""
        share = unknown_rate(self.tokens)
        return f"; {share:.1%} of these are unknown to this vocabulary" if share else ""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the errors of the recovered text, and show it."""
        assert isinstance(pl_module, CharLanguageModel)
        with without_autocast(pl_module.device):
            tokens = self.tokens.to(pl_module.device)
            trip = round_trip(pl_module.model, tokens, torch.float64)
            found = trip.reconstruction()
        row: Numbers = {
            "inverse/residual_max": found.residual,
            "inverse/error_bound_max": found.error_bound,
            "inverse/reconstruction_max": found.reconstruction_error,
            "inverse/num_steps_mean": fmean(found.num_steps.values()),
            "inverse/converged_fraction": found.converged_fraction,
            "inverse/characters_recovered": found.characters_recovered,
        }
        record(trainer, pl_module.step, row)
        if self.decode is not None:
            pairs = zip(self.tokens, trip.decoded.cpu(), strict=True)
            texts = [[self.decode(text) for text in pair] for pair in pairs]
            log_table(trainer, "view/recovered", ["text", "recovered"], texts)


@dataclass(eq=False)
class Sample(L.Callback):
    """Continues a text at every validation, with a random generator of its own."""

    prompt: Integer[Tensor, "tokens"]
    length: int
    decode: Callable[[Tensor], str]  # makes text of tokens
    seed: int = 0
    text: str = field(default="", init=False)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show a continuation by the weights that were validated."""
        assert isinstance(pl_module, CharLanguageModel)
        if trainer.is_global_zero:
            self.text = self.generate(pl_module)
            log_table(trainer, "view/sample", ["text"], [[self.text]])

    def generate(self, module: CharLanguageModel) -> str:
        """The prompt and its continuation."""
        generator = torch.Generator(device=module.device).manual_seed(self.seed)
        prompt = self.prompt.to(module.device)
        tokens = module.model.generate(prompt, self.length, generator=generator)
        return self.decode(tokens.cpu())


@dataclass(eq=False)
class LastValidation(L.Callback):
    """Validates, and so saves, after the last step, even if none is due."""

    max_seconds: float | None = None  # of training, after which this process makes no further step
    start: float = field(default=0.0, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, anew when a run continues."""
        self.start = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Ask Lightning to stop: it validates before that, but not at ``max_steps`` by itself."""
        is_last = trainer.global_step >= trainer.max_steps
        if self.max_seconds is not None and is_step_boundary(trainer):
            is_over = time.monotonic() - self.start >= self.max_seconds
            is_last = is_last or bool(largest_of_processes(int(is_over)))
        trainer.should_stop = trainer.should_stop or is_last
