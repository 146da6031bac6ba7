"""Calls into a library that must never hurt a run: nothing waits for them, nothing is raised."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from invformer.errors import one_line

MAX_WAITING = 10_000  # calls


class ContainedCalls:
    """Runs calls one after the other in a thread of its own, which nothing waits for."""

    def __init__(self) -> None:
        self.failed = 0  # how many raised; the first error is shown in one line
        self.dropped = 0  # how many found the queue full
        self._waiting: queue.Queue[tuple[str, Callable[[], Any], bool]] = queue.Queue(MAX_WAITING)
        self._end = in_background(self._work, "wandb-calls")

    def submit(self, what: str, call: Callable[[], Any]) -> None:
        """Queue a call."""
        try:
            self._waiting.put_nowait((what, call, False))
        except queue.Full:
            self.dropped += 1

    def last(self, call: Callable[[], Any], seconds: float) -> bool:
        """Make a call after all others and wait for it; whether it succeeded."""
        deadline = time.monotonic() + seconds
        try:
            self._waiting.put(("closing the run", call, True), timeout=seconds)
            return self._end.result(deadline - time.monotonic())
        except (queue.Full, TimeoutError):
            return False

    def _work(self) -> bool:
        """Make calls, until the last one is done; whether that succeeded."""
        while True:
            what, call, is_last = self._waiting.get()
            failed = self.failed
            try:
                call()
            except BaseException as error:
                self.failed += 1
                if self.failed == 1:
                    warn(f"{what} failed ({one_line(error)}); the run goes on")
            if is_last:
                return self.failed == failed


def in_background(call: Callable[[], Any], name: str) -> Future[Any]:
    """Make a call in a thread of its own, which does not keep the program from ending."""
    made: Future[Any] = Future()

    def work() -> None:
        try:
            made.set_result(call())
        except Exception as error:
            made.set_exception(error)
        except BaseException as error:  # not to end the program where the result is taken
            made.set_exception(RuntimeError(one_line(error)))

    threading.Thread(target=work, name=name, daemon=True).start()
    return made


def warn(message: str) -> None:
    """One line for people; the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"W&B: {message}", file=sys.stderr)
