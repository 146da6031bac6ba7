"""Weights & Biases as one of Lightning's loggers; the only file that knows it.

It must never hurt a run: nothing here raises, and nothing waits longer than ``START_SECONDS`` and
``FINISH_SECONDS``. Calls run one after the other in a thread of their own, behind a bounded
queue; ``metrics.jsonl`` has every row in any case.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers

from invformer.runs.contained import ContainedCalls, in_background, one_line, warn
from invformer.runs.files import LINK
from invformer.runs.run_log import by_branch

STEP = "trainer/global_step"
# The charts of a run. All other numbers get a prefix by which they are sorted last, and are hidden.
CHARTS = {
    "bits per character": ("train/bpc", "val/bpc"),
    "worst branch: estimate ≤ local bound ≤ bound ≤ target": (
        "lipschitz/estimate", "lipschitz/local_bound", "lipschitz/bound", "lipschitz/target",
    ),
    "characters recovered": ("inverse/characters_recovered",),
    "reconstruction error": ("inverse/reconstruction_max",),
    "learning rate": ("optim/lr",),
    "gradient norm": ("optim/grad_norm",),
    "characters per second": ("perf/characters_per_second",),
}  # fmt: skip
OVERVIEW = {key for keys in CHARTS.values() for key in keys}
DETAIL = "z/"
START_SECONDS = 15.0
ONLINE_SECONDS = 12.0  # of these, for getting online
SERVER_SECONDS = 6.0  # of these, for the server's answers
FINISH_SECONDS = 60.0


def open_wandb(
    directory: Path, *, mode: str, run_id: str | None = None, **options: Any
) -> "WandbLogger | None":
    """Open a W&B run, and say how to look at it; None if there is none.

    ``auto`` is online if W&B finds a key and offline otherwise; nothing ever prompts. If W&B cannot
    go online it goes offline; if that fails too the run goes on without it, with one line.

    Args:
        directory: the run's folder; W&B writes below it.
        run_id: W&B's name for the earlier part of a resumed run. Online that run is continued;
            offline there is a new one, in a group with the earlier parts.
        options: of ``wandb.init``: name, config (no environment variable is in it), project, …
    """
    logging.raiseExceptions = False  # W&B's log files may lie on a full disk: no tracebacks
    wanted = wanted_mode(mode)
    if wanted == "disabled":
        return None
    if (directory / "wandb").is_symlink():
        warn(f"{directory / 'wandb'}: {LINK}; going without W&B")
        return None
    options["dir"] = str(directory)
    began = time.monotonic()
    run = None
    if wanted == "online":
        continued = {} if run_id is None else {"id": run_id, "resume": "allow"}
        online = {**options, **continued, "mode": "online"}
        run = open_within(ONLINE_SECONDS, online, "going offline")
    if run is None:
        left = max(1.0, START_SECONDS - (time.monotonic() - began))
        offline = {**options, "group": options.get("group") or options["name"], "mode": "offline"}
        run = open_within(left, offline, "metrics.jsonl has every row")
    if run is None:
        return None
    logger = WandbLogger(run)
    if run.offline:
        print(f"W&B is offline; to upload: wandb sync {os.path.relpath(logger.folder)}")
    else:
        print(f"W&B: {run.url}")
    return logger


def contained(method: Callable[..., None]) -> Any:
    """A method of the logger whose calls are made by its thread."""

    def submit(self: "WandbLogger", *args: Any, **kwargs: Any) -> None:
        self.calls.submit(method.__name__, lambda: method(self, *args, **kwargs))

    return submit


class WandbLogger(loggers.WandbLogger):
    """Lightning's W&B logger, whose calls are made by a thread that cannot hurt the run.

    Rows carry the optimiser step as a value of their own, which is the x-axis of every chart: W&B
    drops rows whose own step goes backwards.
    """

    def __init__(self, run: Any) -> None:
        self.folder = Path(run.dir).parent
        super().__init__(experiment=run, save_dir=self.folder)
        self.run = run
        self.calls = ContainedCalls()

    @property
    def online_id(self) -> str | None:
        """W&B's name for the run, by which it can be continued; None if it is not online."""
        return None if self.run.offline else str(self.run.id)

    @contained
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row; at a validation also a bar for every branch, and the lowest val/bpc."""
        row: dict[str, Any] = {k if k in OVERVIEW else DETAIL + k: v for k, v in metrics.items()}
        if "lipschitz/local_bound" in metrics:
            row |= branch_charts(metrics)
        self.run.log({**row, STEP: step})
        if "val/bpc" in metrics:
            lowest = self.run.summary.get("val/bpc", math.inf)
            self.run.summary["val/bpc"] = min(lowest, metrics["val/bpc"])

    @contained
    def log_hyperparams(self, params: Any) -> None:
        """Add to the configuration."""
        self.run.config.update(params, allow_val_change=True)

    @contained
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        """Attach a table, such as a certificate or a sample."""
        self.run.log({key: sys.modules["wandb"].Table(columns=columns, data=data), STEP: step})

    @contained
    def log_image(self, key: str, images: list[Path], step: int) -> None:
        """Attach pictures."""
        self.run.log({key: [sys.modules["wandb"].Image(str(i)) for i in images], STEP: step})

    @contained
    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Set final values: text and finite numbers."""
        for key, value in values.items():
            if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
                self.run.summary[key] = value

    @contained
    def log_folder(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Attach the files of a checkpoint, which stay where they are."""
        artifact = sys.modules["wandb"].Artifact(self.run.name, "model", metadata=metadata)
        for path in folder.iterdir():
            artifact.add_file(str(path), path.name, policy="immutable", skip_cache=True)
        self.run.log_artifact(artifact, aliases=["best", f"step-{metadata['step']}"])

    @contained
    def alert(self, title: str, text: str) -> None:
        """Have W&B tell the user, if she allows that."""
        self.run.alert(title, text, level="ERROR")

    def finish(self, exit_code: int) -> None:
        """Close the run with the program's exit code; gives up after a minute."""
        if not self.calls.last(lambda: self.run.finish(exit_code=exit_code), FINISH_SECONDS):
            warn("the run could not be closed and is left as it is")
            abandon_service()
        if lost := self.calls.failed + self.calls.dropped:
            warn(f"{lost} calls were lost; metrics.jsonl has every row, {self.folder} what W&B got")


def add_to_summary(directory: Path, values: Mapping[str, Any], **run: Any) -> None:
    """Add text and numbers to the summary of an online run that is over, if there is a key.

    The run is named by its id, project and entity.
    """
    if wanted_mode("auto") != "online" or (directory / "wandb").is_symlink():
        return
    options = {**run, "dir": str(directory), "resume": "must", "mode": "online"}
    if opened := open_within(ONLINE_SECONDS, options, "the summary of the run stays as it is"):
        logger = WandbLogger(opened)
        logger.log_summary(values)
        logger.finish(0)


def open_within(seconds: float, options: dict[str, Any], otherwise: str) -> Any:
    """Open a W&B run, or say in one line why there is none and what happens instead.

    A run that opens too late is closed again.
    """
    opened = in_background(lambda: start(options), "wandb-start")
    try:
        return opened.result(seconds)
    except Exception as error:
        is_late = not opened.done()
        warn(f"{f'no answer within {seconds:.0f} s' if is_late else one_line(error)}; {otherwise}")
    if is_late:
        opened.add_done_callback(lambda late: late.exception() or late.result().finish(exit_code=1))
    return None


def start(options: dict[str, Any]) -> Any:
    """wandb.init, with the optimiser step as the x-axis of everything."""
    import wandb  # takes a second, and may be broken

    settings = wandb.Settings(
        silent=True, console="wrap", save_code=True,
        init_timeout=SERVER_SECONDS, finish_timeout=0.8 * FINISH_SECONDS,
    )  # fmt: skip
    run = wandb.init(**options, settings=settings)
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    run.define_metric(f"{DETAIL}*", step_metric=STEP, hidden=True)
    run.define_metric("val/bpc", step_metric=STEP, summary="none")  # the lowest, by the logger
    return run


def branch_charts(row: Mapping[str, float]) -> dict[str, Any]:
    """A bar for every branch, one chart each of the estimates, local bounds and bounds."""
    wandb = sys.modules["wandb"]
    branches = sorted(by_branch(row).items())
    found = {}
    for key in ("estimate", "local_bound", "bound"):
        bars = wandb.Table(["branch", key], [[name, values[key]] for name, values in branches])
        title = f"{key} of every branch"
        found[f"view/{key}_by_branch"] = wandb.plot.bar(bars, "branch", key, title)
    return found


def abandon_service() -> None:
    """End W&B's own process, for which its exit hooks would wait forever."""
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the hook
        connection._proc._process.kill()


def wanted_mode(mode: str) -> str:
    """The mode if not ``auto``, else that of ``WANDB_MODE``, else online if there is a key."""
    if mode != "auto":
        return mode
    told = os.environ.get("WANDB_MODE", "").lower()
    if told in ("offline", "dryrun", "disabled"):
        return "disabled" if told == "disabled" else "offline"
    return "online" if has_api_key() else "offline"


def has_api_key() -> bool:
    """Whether W&B itself finds a key or an identity token, without a prompt and a network.

    It looks in the environment, in the netrc file (``NETRC``) and in its settings, for the host of
    ``WANDB_BASE_URL``, of its settings or of its own default.
    """
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth

        host = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(
            host=host, source="train.py", prompt=False, update_session=False
        )
    except Exception as error:
        warn(f"{one_line(error)}; going offline")
        return False
    return found is not None
