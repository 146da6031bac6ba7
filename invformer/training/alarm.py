"""Say early that a training goes wrong: a branch's local constant grows far beyond its start."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from tqdm import tqdm

from invformer.config.schema import AlarmMode
from invformer.errors import Alarmed
from invformer.processes.collective import largest_of_processes
from invformer.runs.run_log import Row, by_branch
from invformer.training.rows import rows_of

# Times its start; both from studies.early_warning.
GROWTH, RATES = 225.0, "in our study such trainings ended badly in 81 of 83 cases"
LEAST = 0.01  # of the largest start: a branch may begin at zero and grow from there
TITLE = "a local constant grows"


def growth(now: Mapping[str, float], start: Mapping[str, float]) -> tuple[float, str]:
    """The largest ratio of an estimate to its start, and the name of its branch.

    A start counts as at least a hundredth of the largest one. NaN counts as infinite.
    """
    least = LEAST * max(start.values())
    ratios = {name: now[name] / max(start[name], least) for name in start if name in now}
    name = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
    return math.inf if math.isnan(ratios[name]) else ratios[name], name


def blocks_of(model: nn.Module) -> set[str]:
    """The names of a model's blocks: the members of its outermost lists of modules."""
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outermost = {n for n in lists if not any(n.startswith(f"{other}.") for other in lists)}
    return {f"{n}.{i}" for n in outermost for i in range(lists[n])}


@dataclass(eq=False)
class Alarm(L.Callback):
    """Warns once, or stops, when an estimate of the monitor is ``GROWTH`` times its start.

    It looks at the rows that are sent to loggers, so nothing waits for it. It watches the branches
    of our models; the blocks of other ones, or all modules that are measured if none is a list's.

    Args:
        mode: off only keeps the starts; stop ends the training where Lightning can stop, after a
            validation, so that everything is saved.

    Attributes:
        start: the first estimates of the run.
        sounded: what was said, empty so far.
    """

    mode: AlarmMode
    start: dict[str, float] = field(default_factory=dict, init=False)
    sounded: str = field(default="", init=False)
    is_heard: bool = field(default=False, init=False)  # the training ends because of it

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to the rows."""
        self.trainer, self.blocks = trainer, blocks_of(pl_module)
        if self.hear not in (listeners := rows_of(trainer).listeners):
            listeners.append(self.hear)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to go on where it has sounded; raises Alarmed."""
        if self.mode == "stop" and self.sounded:
            raise Alarmed(f"the alarm has stopped this run ({self.sounded})")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Stop in all processes, or in none."""
        if self.mode == "stop" and trainer.global_step % rows_of(trainer).every == 0:
            self.is_heard = bool(largest_of_processes(int(bool(self.sounded))))
            trainer.should_stop = trainer.should_stop or self.is_heard

    def hear(self, step: int, row: Row) -> None:
        """Compare the estimates of a row with their starts."""
        now = {n: each["estimate"] for n, each in by_branch(row).items() if "estimate" in each}
        if not now:
            prefix = "lipschitz/"
            all_of_them = {k[len(prefix) :]: v for k, v in row.items() if k.startswith(prefix)}
            now = {n: v for n, v in all_of_them.items() if n in self.blocks} or all_of_them
        if not self.start and all(map(math.isfinite, now.values())) and any(now.values()):
            self.start = now
        if self.mode == "off" or self.sounded or not now.keys() & self.start:
            return
        ratio, name = growth(now, self.start)
        if ratio <= GROWTH:
            return
        self.sounded = (
            f"step {step}: local constant of {name} {now[name]:,.4g}, {ratio:,.0f} times its "
            f"start; {RATES}: try a smaller optim.lr"
        )
        if self.trainer.is_global_zero:
            tqdm.write(self.sounded, file=sys.stderr)  # above a bar if there is one
            for logger in self.trainer.loggers:
                if isinstance(logger, WandbLogger):
                    target: Any = logger if hasattr(logger, "alert") else logger.experiment
                    target.alert(TITLE, self.sounded)

    def state_dict(self) -> dict[str, Any]:
        """The starts, and what was said."""
        return {"start": self.start, "sounded": self.sounded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.start, self.sounded = state_dict["start"], state_dict["sounded"]
