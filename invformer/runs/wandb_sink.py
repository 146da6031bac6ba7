"""Weights & Biases as one more place where metrics go; the only file that knows it.

It must never hurt a run: nothing here raises, and nothing waits longer than ``START_SECONDS`` and
``FINISH_SECONDS``. Calls run one after the other in a thread of their own, behind a bounded
queue; ``metrics.jsonl`` has every row in any case.
"""

import contextlib
import logging
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from invformer.runs.run_log import Row

STEP = "trainer/global_step"
START_SECONDS = 15.0
ONLINE_SECONDS = 12.0  # of these, for getting online
SERVER_SECONDS = 6.0  # of these, for the server's answers
FINISH_SECONDS = 60.0
MAX_WAITING = 10_000  # calls
FULL_DISK = 1 << 20  # bytes left

Mode = Literal["auto", "online", "offline", "disabled"]


class WandbSink:
    """Mirrors rows, tables and images into one W&B run.

    ``auto`` is online if W&B finds a key and offline otherwise; nothing ever prompts. If W&B cannot
    go online it goes offline; if that fails too the run goes on without it, with one line. Rows
    carry the optimiser step as a value of their own, which is the x-axis of every chart: W&B drops
    rows whose own step goes backwards.

    Args:
        directory: the run's folder; W&B writes below it.
        name: display name.
        config: the resolved configuration, plain and nested. No environment variable is in it.
        project: W&B project.
        mode: see above.
        entity: user or team; None for the account's default.
        group: group of runs.
        tags: labels.
        run_id: W&B's name for the earlier part of a resumed run. Online that run is continued;
            offline there is a new one, in a group with the earlier parts.
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
        run_id: str | None = None,
    ) -> None:
        self.directory = directory
        self.run: Any = None
        self._calls = ContainedCalls()
        logging.raiseExceptions = False  # W&B's log files may lie on a full disk: no tracebacks
        options = {
            "dir": str(directory), "name": name, "config": config, "project": project,
            "entity": entity, "group": group, "tags": list(tags),
        }  # fmt: skip
        wanted = wanted_mode(mode)
        if wanted == "disabled":
            return
        if (directory / "wandb").is_symlink():
            warn(f"{directory / 'wandb'} is a link, which is not followed; going without W&B")
            return
        began = time.monotonic()
        if wanted == "online":
            continued = {} if run_id is None else {"id": run_id, "resume": "allow"}
            self._start({**options, **continued, "mode": "online"}, ONLINE_SECONDS, "going offline")
        if self.run is None:
            left = max(1.0, START_SECONDS - (time.monotonic() - began))
            options["group"] = group or name
            self._start({**options, "mode": "offline"}, left, "metrics.jsonl has every row")
        if self.run is not None and self.run.offline:
            folder = Path(self.run.dir).parent
            print(f"W&B is offline; to upload: wandb sync {os.path.relpath(folder)}")

    @property
    def online_id(self) -> str | None:
        """W&B's name for the run, by which it can be continued; None if it is not online."""
        return None if self.run is None or self.run.offline else str(self.run.id)

    def __call__(self, step: int, row: Row) -> None:
        """Log one row at its optimiser step."""
        self._call(f"row of step {step}", lambda run, _: run.log({**row, STEP: step}))

    def table(self, key: str, columns: list[Any], rows: list[Any]) -> None:
        """Attach a table, such as a certificate or a sample."""
        self._call(key, lambda run, wandb: run.log({key: wandb.Table(columns=columns, data=rows)}))

    def image(self, key: str, path: Path) -> None:
        """Attach a picture."""
        self._call(key, lambda run, wandb: run.log({key: wandb.Image(str(path))}))

    def summary(self, values: dict[str, Any]) -> None:
        """Set final values: text and finite numbers."""
        plain = {
            key: value for key, value in values.items()
            if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        }  # fmt: skip
        self._call("summary", lambda run, _: run.summary.update(plain))

    def finish(self, exit_code: int) -> None:
        """Close the run with the program's exit code; gives up after a minute."""
        if self.run is None:
            return
        if not self._calls.last(lambda: self.run.finish(exit_code=exit_code), FINISH_SECONDS):
            warn("the run could not be closed and is left as it is")
            abandon_service()
        if lost := self._calls.failed + self._calls.dropped:
            folder = Path(self.run.dir).parent
            warn(f"{lost} calls were lost; metrics.jsonl has every row, {folder} what W&B got")
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.directory).free < FULL_DISK:
                warn(f"the disk is full ({self.directory}); its copy of the run may be incomplete")

    def _start(self, options: dict[str, Any], seconds: float, otherwise: str) -> None:
        """Open the W&B run, or say in one line why there is none."""
        try:
            self.run = within(seconds, lambda: start(options))
        except Exception as error:
            warn(f"{one_line(error)}; {otherwise}")

    def _call(self, what: str, call: Callable[[Any, Any], Any]) -> None:
        """Have a call made with the run and the library."""
        if self.run is not None:
            self._calls.submit(what, lambda: call(self.run, sys.modules.get("wandb")))


def start(options: dict[str, Any]) -> Any:
    """wandb.init, with the optimiser step as the x-axis of everything."""
    import wandb  # takes a second, and may be broken

    settings = wandb.Settings(
        silent=True, console="off", init_timeout=SERVER_SECONDS, finish_timeout=0.8 * FINISH_SECONDS
    )
    run = wandb.init(**options, settings=settings)
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    run.define_metric("val/bpc", step_metric=STEP, summary="min,last")
    return run


class ContainedCalls:
    """Runs calls one after the other in a thread of its own, which nothing waits for.

    Attributes:
        failed: how many raised; the first error is shown in one line.
        dropped: how many found the queue full.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.dropped = 0
        self._waiting: queue.Queue[tuple[str, Callable[[], Any]]] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._work, name="wandb-calls", daemon=True).start()

    def submit(self, what: str, call: Callable[[], Any]) -> None:
        """Queue a call."""
        try:
            self._waiting.put_nowait((what, call))
        except queue.Full:
            self.dropped += 1

    def last(self, call: Callable[[], Any], seconds: float) -> bool:
        """Make a call after all others and wait for it; whether it succeeded."""
        deadline = time.monotonic() + seconds
        done = threading.Event()
        went_well = []

        def then() -> None:
            try:
                went_well.append(call() is None)
            finally:
                done.set()

        with contextlib.suppress(queue.Full):
            self._waiting.put(("closing the run", then), timeout=seconds)
            done.wait(deadline - time.monotonic())
        return bool(went_well)

    def _work(self) -> None:
        while True:
            what, call = self._waiting.get()
            try:
                call()
            except BaseException as error:
                self.failed += 1
                if self.failed == 1:
                    warn(f"{what} failed ({one_line(error)}); the run goes on")


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The run that a call opens; a run that opens too late is closed again.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: the call failed.
    """
    opened: Future[Any] = Future()

    def work() -> None:
        try:
            opened.set_result(call())
        except BaseException as error:
            opened.set_exception(RuntimeError(one_line(error)))

    threading.Thread(target=work, name="wandb-start", daemon=True).start()
    try:
        return opened.result(seconds)
    except TimeoutError:
        opened.add_done_callback(lambda late: late.exception() or late.result().finish(exit_code=1))
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def abandon_service() -> None:
    """End W&B's own process, for which its exit hooks would wait forever."""
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the hook
        connection._proc._process.kill()


def wanted_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """The mode that was asked for, else that of ``WANDB_MODE``, else online if there is a key."""
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


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{error}".split())[:160] or type(error).__name__


def warn(message: str) -> None:
    """One line for people; the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"W&B: {message}", file=sys.stderr)
