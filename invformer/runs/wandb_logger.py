"""Weights & Biases as one of Lightning's loggers; the only file that knows it.

It must never hurt a run: nothing here raises, and nothing waits longer than ``START_SECONDS`` and
``FINISH_SECONDS``. Calls run one after the other in a thread of their own, behind a bounded
queue; ``metrics.jsonl`` has every row in any case.
"""

import contextlib
import hashlib
import html
import logging
import math
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers

from invformer.errors import one_line
from invformer.processes.contained import ContainedCalls, in_background, warn
from invformer.runs.files import LINK

STEP = "trainer/global_step"
# Names in W&B alone, which sorts by them.
NAMES = {"train/bpc": "bpc/train", "val/bpc": "bpc/val"}
# The charts of a run. All other numbers get a prefix by which they are sorted last, and are hidden.
CHARTS = {
    "bits per character": ("bpc/train", "bpc/val"),
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
BEST = "bpc/val"  # whose lowest value is the run's summary
DETAIL = "z/"
OFFLINE = ("offline", "dryrun")
# Without symbolic links: the run's folder may move, and old checkpoints are deleted.
DEFAULTS = {"project": "invformer", "run_job_type": "train", "symlink": False}
KEPT = ("project", "entity", "run_group", "run_name")  # by the parts of a run
START_SECONDS = 15.0
ONLINE_SECONDS = 12.0  # of these, for getting online
SERVER_SECONDS = 6.0  # of these, for the server's answers
FINISH_SECONDS = 60.0


def open_wandb(
    directory: Path,
    *,
    mode: str,
    asked: Mapping[str, Any],
    defaults: Mapping[str, Any],
    earlier: Mapping[str, Any] | None = None,
) -> "WandbLogger | None":
    """Open a W&B run, and say how to look at it; None if there is none.

    Each of W&B's settings is what was asked for, else that of the part of the run before, else what
    W&B finds in its environment and files, else the default. If W&B cannot go online it goes
    offline; if that fails too the run goes on without it, with one line.

    Args:
        directory: the run's folder; W&B writes below it, unless its own settings name another.
        mode: of W&B; ``auto`` is what W&B finds, but offline without a key. Nothing ever prompts.
        asked: settings by name; those that are None or empty were not asked for.
        defaults: settings by name, beside :data:`DEFAULTS`.
        earlier: :attr:`WandbLogger.identity` of the part before. An online run is continued in its
            own folder; in a copy, and offline, a new run of its group begins.
    """
    logging.raiseExceptions = False  # W&B's log files may lie on a full disk: no tracebacks
    own = {} if mode == "disabled" else read_settings()
    wanted = own["mode"] if mode == "auto" else mode
    if wanted == "disabled":
        return None
    if "root_dir" not in own and (directory / "wandb").is_symlink():
        warn(f"{directory / 'wandb'}: {LINK}; going without W&B")
        return None
    known, place = earlier or {}, place_of(directory)
    run_id, is_copy = known.get("run_id"), known.get("folder", place) != place
    if is_copy and run_id:
        warn(f"{directory} is a copy of W&B's run {run_id}: a new run of its group begins")
        run_id = None
    kept = {key: known.get(key) for key in (KEPT[:-1] if is_copy else KEPT)}
    name = directory.name
    ours = {"run_name": name, "run_group": name, "root_dir": str(directory), **DEFAULTS, **defaults}
    options = {key: value for key, value in ours.items() if key not in own}
    options |= {key: value for key, value in [*kept.items(), *asked.items()] if value}
    if earlier:  # two runs of one id would overwrite each other on the server
        options["run_id"] = secrets.token_hex(4)
    began = time.monotonic()
    run = None
    if wanted not in OFFLINE:
        continued = {"run_id": run_id, "resume": "allow"} if run_id else {}
        run = open_within(ONLINE_SECONDS, options | continued | {"mode": wanted}, "going offline")
    if run is None:
        left = max(1.0, START_SECONDS - (time.monotonic() - began))
        run = open_within(left, options | {"mode": "offline"}, "metrics.jsonl has every row")
    if run is None:
        return None
    identity = dict(zip(KEPT, (run.project, run.entity, run.group, run.name), strict=True))
    identity |= {"run_id": run_id if run.offline else run.id, "folder": place}
    logger = WandbLogger(run, identity)
    if run.offline:
        print(f"W&B is offline; to upload: wandb sync {shlex.quote(str(logger.folder.resolve()))}")
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

    def __init__(self, run: Any, identity: Mapping[str, Any]) -> None:
        self.folder = Path(run.dir).parent
        super().__init__(experiment=run, save_dir=self.folder)
        self.run = run
        self.identity = identity  # settings; the ``run_id`` only if the run is online somewhere
        self.calls = ContainedCalls()

    @contained
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row; at a validation also the lowest bits per character."""
        names = {key: NAMES.get(key, key) for key in metrics}
        row = {n if n in OVERVIEW else DETAIL + n: metrics[key] for key, n in names.items()}
        self.run.log({**row, STEP: step})
        if BEST in row:
            self.run.summary[BEST] = min(self.run.summary.get(BEST, math.inf), row[BEST])

    @contained
    def log_hyperparams(self, params: Any) -> None:
        """Add to the configuration."""
        self.run.config.update(params, allow_val_change=True)

    @contained
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        """Show a table, such as a certificate or a sample.

        As a page of HTML: W&B keeps the content of its own tables outside the run's folder.
        """
        cells = (f"<td>{'<td>'.join(html.escape(f'{x}') for x in row)}" for row in [columns, *data])
        page = f"<table style='white-space: pre-wrap; text-align: left'><tr>{'<tr>'.join(cells)}"
        self.run.log({key: sys.modules["wandb"].Html(page, inject=False), STEP: step})

    @contained
    def log_image(self, key: str, images: list[Any], step: int) -> None:
        """Attach pictures: files, or whatever ``wandb.Image`` takes."""
        self.run.log({key: [sys.modules["wandb"].Image(i) for i in images], STEP: step})

    @contained
    def log_folder(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Attach the files of a checkpoint: online as an artifact, offline as files of the run.

        An artifact would name their present place, which a later upload could not find if the
        folder was moved, or the checkpoint deleted.
        """
        if self.run.offline:
            for path in folder.iterdir():
                self.run.save(path.absolute(), folder.absolute().parent, "end", glob=False)
            return
        artifact = sys.modules["wandb"].Artifact(self.run.name, "model", metadata=metadata)
        for path in folder.iterdir():
            artifact.add_file(str(path.absolute()), path.name, policy="immutable", skip_cache=True)
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


def add_to_summary(
    directory: Path, values: Mapping[str, float], identity: Mapping[str, Any]
) -> None:
    """Add finite numbers to the summary of an online run that is over, if W&B may go online.

    The run is named by its :attr:`WandbLogger.identity`; a copy of its folder adds nothing.
    """
    if identity.get("folder") != place_of(directory) or (directory / "wandb").is_symlink():
        return
    own = read_settings()
    if own["mode"] in (*OFFLINE, "disabled"):
        return
    options = {key: identity.get(key) for key in ("run_id", "project", "entity")}
    options |= {"root_dir": own.get("root_dir", str(directory)), "resume": "must", "mode": "online"}
    if opened := open_within(ONLINE_SECONDS, options, "the summary of the run stays as it is"):
        logger = WandbLogger(opened, identity)
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        logger.calls.submit("add_to_summary", lambda: opened.summary.update(finite))
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
    """wandb.init with these settings, and the optimiser step as the x-axis of everything."""
    import wandb  # takes a second, and may be broken

    seconds = {"init_timeout": SERVER_SECONDS, "finish_timeout": 0.8 * FINISH_SECONDS}
    # Never a run that opened too late, which is about to be closed.
    run = wandb.init(settings=options | seconds | {"reinit": "create_new"})
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    run.define_metric(f"{DETAIL}*", step_metric=STEP, hidden=True)
    run.define_metric(BEST, step_metric=STEP, summary="none")  # the lowest, by the logger
    return run


def read_settings() -> dict[str, Any]:
    """What a user has set in W&B's files and environment, by the names of W&B's settings.

    ``mode`` is always there: ``offline`` if there is no key, or if W&B fails.
    """
    own: dict[str, Any] = {}

    def read() -> None:
        quiet = None if "WANDB_SILENT" in os.environ else wandb.Settings(silent=True)
        settings = wandb.setup(quiet).settings
        own.update({key: getattr(settings, key) for key in settings.model_fields_set})
        own["mode"] = settings.mode
        if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
            own["mode"] = "disabled"  # Transformers honours it, and W&B did once
        elif settings.mode not in (*OFFLINE, "disabled"):
            own["mode"] = "offline"
            if wandb.login(prompt=False, verify=False):
                own["mode"] = settings.mode

    try:
        import wandb

        in_background(read, "wandb-settings").result(START_SECONDS)
    except Exception as error:
        warn(f"{one_line(error)}; going offline")
        own.setdefault("mode", "offline")
    return own


def place_of(folder: Path) -> str:
    """A fingerprint of host, device and inode: a moved folder keeps it, a copy has another."""
    status = folder.stat()
    place = f"{socket.gethostname()} {status.st_dev} {status.st_ino}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def abandon_service() -> None:
    """End W&B's own process, for which its exit hooks would wait forever.

    The only place with names that are private to W&B; pyproject.toml bounds its version.
    """
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the hook
        connection._proc._process.kill()
