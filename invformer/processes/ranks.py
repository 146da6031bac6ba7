"""What a rank (a process that a launcher started) does, and how a run is told to stop."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from invformer.errors import RankLost

REPORTS = "INVFORMER_REPORTS"  # the folder in which ranks report how they ended
POLL = 0.2  # seconds


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those it may run on, within the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        pass
    return max(1, cores)


def hear_to_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP.

    SIGHUP means that the terminal was closed. It stays ignored where it is, as under ``nohup``.
    """
    for name in signals_to_stop():
        signal.signal(signal.Signals[name], handler)


def signals_to_stop() -> list[str]:
    """The names of the signals that stop a run."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return ["SIGINT", "SIGTERM"] if is_ignored else ["SIGINT", "SIGTERM", "SIGHUP"]


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Handle the signals that stop a run as before, once the work within has ended in any way."""
    numbers = [signal.Signals[name] for name in signals_to_stop()]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def is_rank() -> bool:
    """Whether a launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_value(name: str, otherwise: int) -> int:
    """A number that the launcher tells its ranks, such as ``RANK`` or ``WORLD_SIZE``."""
    return int(os.environ[name]) if is_rank() else otherwise


def end_with_launcher() -> None:
    """End this process when its launcher is gone."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL)
        os._exit(RankLost.exit_code)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
