"""What a run says while it trains, and what it found when it is done."""

import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
from tqdm import tqdm

from invformer.numerics.rounding import downwards, upwards
from invformer.runs.run_log import Row, read_rows
from invformer.runs.saving import Checkpoints
from invformer.training.callbacks import InversionMonitor
from invformer.training.rows import rows_of

SMOOTHED = 100  # steps
RISES = 2  # validations without a better one that are worth a word
LINES = 5  # a run, beside those of validations
BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}  {desc}  {rate_fmt}  {remaining} left"


class Progress(L.Callback):
    """A line at every validation; between them a bar on a terminal, or else five lines a run.

    It shows the rows that were sent, so it never waits for the device. ``metrics`` has those of the
    steps before, if there are any; ``last`` is the optimiser step at which the run ends.
    """

    def __init__(self, metrics: Path, last: int, val_every: int, bar: bool) -> None:
        self.last = last
        self.val_every = val_every
        self.has_bar = bar and sys.stderr.isatty()
        self.row: Row = {}  # the newest number of every key
        self.recent: deque[float] = deque(maxlen=SMOOTHED)
        self.bar = tqdm(disable=True)  # until training begins
        for row in read_rows(metrics) if metrics.exists() else []:
            self.take(row["step"], row)

    def take(self, step: int, row: Row) -> None:
        """Remember the numbers of one step."""
        self.row |= row
        if "train/bpc" in row:
            self.recent.append(row["train/bpc"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, at the step that training starts or continues with."""
        rows_of(trainer).listeners.append(self.take)
        self.step = self.first = trainer.global_step
        self.start = time.perf_counter()
        self.bar = tqdm(
            total=self.last, initial=self.first, bar_format=BAR, unit=" steps",
            smoothing=0.02, leave=False, dynamic_ncols=True, disable=not self.has_bar,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Move the bar; without one print a line after every fifth of the run."""
        step, last = trainer.global_step, self.last
        if step == self.step:  # a batch of an optimiser step that is not complete
            return
        self.step = step
        self.bar.set_description_str(f"{self.loss()}  {self.validated()}", refresh=False)
        self.bar.update()
        is_due = step % max(1, last // LINES) == 0 and step % self.val_every and step < last
        if is_due and self.recent and not self.has_bar:
            self.say(self.loss(), self.pace())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print what was validated."""
        self.row |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        words = [self.loss(), self.validated()]
        if "lipschitz/bound" in self.row:
            words.append(f"bounds ≤ {upwards(self.row['lipschitz/bound'], 4)} proven")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if "inverse/characters_recovered" in self.row:
            caveats = (c.caveat for c in callbacks if isinstance(c, InversionMonitor))
            share = percent(self.row["inverse/characters_recovered"])
            words.append(f"recovered {share}{next(caveats, '')}")
        self.say(*words, self.pace())
        for kept in (c for c in callbacks if isinstance(c, Checkpoints)):
            if kept.num_worse == RISES and kept.best_name is not None:
                step = int(kept.best_name.split("-")[1])
                self.say(f"the best validation was {kept.best:.3f} at step {step}, which is kept")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the bar away."""
        self.bar.close()

    on_exception = on_train_end

    def loss(self) -> str:
        """Bits per character of the last steps."""
        return f"train {fmean(self.recent):.3f}" if self.recent else ""

    def validated(self) -> str:
        """Bits per character of the last validation."""
        return f"val {self.row['val/bpc']:.3f}" if "val/bpc" in self.row else ""

    def pace(self) -> str:
        """Steps a second since training started or continued, and the time that is left."""
        rate = (self.step - self.first) / (time.perf_counter() - self.start)
        if rate == 0:  # a validation that an interrupted run makes up for
            return ""
        left = tqdm.format_interval((self.last - self.step) / rate)
        return f"{rate:.3g} steps/s" + (f"  {left} left" if self.step < self.last else "")

    def say(self, *words: str) -> None:
        """One line about the present step, above the bar if there is one."""
        step = f"step {self.step:>{len(str(self.last))}}/{self.last}"
        tqdm.write("  ".join(filter(None, [step, *words])), file=sys.stdout)
        sys.stdout.flush()


def percent(share: float) -> str:
    """A share rounded downwards: 100 % means all."""
    return f"{100 * downwards(share, 3):g} %"
