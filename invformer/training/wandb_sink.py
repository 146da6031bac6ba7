"""Weights & Biases as one more place where metrics go; the only file that knows it."""

import math
import netrc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb
from wandb.errors import CommError, UsageError

from invformer.training.run_log import Row

STEP = "trainer/global_step"
Mode = Literal["auto", "online", "offline", "disabled"]


class WandbSink:
    """Mirrors rows, tables and images into one W&B run.

    ``auto`` is online where an API key is at hand and offline otherwise; nothing ever prompts. Rows
    carry the optimiser step as a value of their own, which is the x-axis of every chart: W&B drops
    rows whose own step goes backwards.

    Args:
        directory: the run's folder; W&B writes below it.
        name: display name.
        config: the resolved configuration, plain and nested.
        project: W&B project.
        mode: see above.
        entity: user or team; None for the account's default.
        group: group of runs, such as a resumed run with its earlier parts.
        tags: labels.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        config: dict[str, Any],
        project: str,
        mode: Mode,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        options: dict[str, Any] = {
            "dir": str(directory), "name": name, "config": config, "project": project,
            "entity": entity, "group": group, "tags": list(tags),
        }  # fmt: skip
        settings = wandb.Settings(silent=True, console="off", init_timeout=15)
        self.run = start(options, settings, "online" if mode == "auto" else mode, mode == "auto")
        if self.run.offline and mode != "disabled":
            folder = Path(self.run.dir).parent
            print(f"W&B is offline; to upload: wandb sync {os.path.relpath(folder)}")
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self.run.define_metric("val/bpc", step_metric=STEP, summary="min,last")

    def __call__(self, step: int, row: Row) -> None:
        """Log one row at its optimiser step; metrics.jsonl has it in any case."""
        try:
            self.run.log({**row, STEP: step})
        except Exception as error:
            print(f"W&B: row of step {step} not logged ({error})", file=sys.stderr)

    def table(self, key: str, columns: list[Any], rows: list[Any]) -> None:
        """Attach a table, such as a certificate or a sample."""
        self.run.log({key: wandb.Table(columns=columns, data=rows)})

    def image(self, key: str, path: Path) -> None:
        """Attach a picture."""
        self.run.log({key: wandb.Image(str(path))})

    def summary(self, values: dict[str, Any]) -> None:
        """Set final values."""
        self.run.summary.update({k: v for k, v in values.items() if is_plain(v)})

    def finish(self, exit_code: int) -> None:
        """Close the run with the program's exit code."""
        self.run.finish(exit_code=exit_code)


def start(
    options: dict[str, Any],
    settings: Any,
    mode: Literal["online", "offline", "disabled"],
    may_fall_back: bool,
) -> Any:
    """wandb.init in the wanted mode, or offline where ``auto`` finds no key or no server."""
    if may_fall_back and not has_api_key():
        mode = "offline"
    try:
        return wandb.init(**options, mode=mode, settings=settings)
    except (UsageError, CommError) as error:
        if not may_fall_back:
            raise
        print(f"W&B: {str(error).splitlines()[0]}; going on offline", file=sys.stderr)
        return wandb.init(**options, mode="offline", settings=settings)


def has_api_key() -> bool:
    """Whether a key is configured, found without prompting and without a network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc().authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def is_plain(value: Any) -> bool:
    """Whether W&B can hold a value in its summary."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
