"""Calls into a library that must never hurt a run: nothing waits for them, nothing is raised."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

MAX_WAITING = 10_000  # calls


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


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{error}".split())[:160] or type(error).__name__


def warn(message: str) -> None:
    """One line for people; the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"W&B: {message}", file=sys.stderr)
