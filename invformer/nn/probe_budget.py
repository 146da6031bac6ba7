"""How much may be measured in a given share of the step time."""

import math
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

# Shorter probes save nothing: what is left is the cost of starting operations.
SHORTEST = 16
MOST_SEQUENCES = 4
# A share between these multiples of the budget is as good as the budget.
TOLERATED = (1 / 3, 1.2)
# Steps and looks that a median is taken of.
RECENT = 50


@dataclass(frozen=True)
class Size:
    """A probe of some sequences, each of its first ``length`` characters."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Characters in all."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Choice:
    """What is measured, every how many optimiser steps."""

    size: Size
    every: int

    def describe(self) -> str:
        """In words."""
        plural = "" if self.size.sequences == 1 else "s"
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"{self.size.sequences} sequence{plural} of {self.size.length} characters {often}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {**asdict(self.size), "every": self.every}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Choice":
        """From a checkpoint's numbers."""
        size = Size(int(values["sequences"]), int(values["length"]))
        return cls(size, int(values["every"]))


def probe_sizes(
    num_sequences: int, seq_len: int, sequences: int | None = None, length: int | None = None
) -> list[Size]:
    """The sizes to choose from, smallest first: one window or less, then several whole windows.

    Args:
        num_sequences: windows there are.
        seq_len: their length.
        sequences: how many to take; None leaves that open.
        length: how much of each; None leaves that open.
    """
    lengths = [seq_len if length is None else min(length, seq_len)]
    while length is None and lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    lengths.reverse()
    if sequences is not None:
        return [Size(min(sequences, num_sequences), each) for each in lengths]
    longest = lengths[-1]
    several = [2**k for k in range(1, 10) if 2**k <= min(num_sequences, MOST_SEQUENCES)]
    return [Size(1, each) for each in lengths] + [Size(count, longest) for count in several]


def choose(
    seconds: dict[Size, float], rest: float, budget: float, every: int | None = None
) -> Choice:
    """The largest probe that can be measured at every step, or else the smallest, more rarely.

    Args:
        seconds: what one look costs at each size, smallest first.
        rest: seconds of a step without it.
        budget: largest share of ``rest`` that estimates may take.
        every: steps between two looks, if that is given: larger probes fit then.
    """
    allowed = budget * rest * (1 if every is None else every)
    fitting = [size for size, cost in seconds.items() if cost <= allowed]
    if fitting:
        return Choice(fitting[-1], every or 1)
    smallest = next(iter(seconds))
    return Choice(smallest, every or math.ceil(seconds[smallest] / max(allowed, 1e-9)))


def could_be_better(
    choice: Choice, share: float, budget: float, sizes: list[Size], every: int | None = None
) -> bool:
    """Whether a choice takes clearly more or less than the budget, and another one would not.

    There is nothing smaller than the smallest probe at given steps, and nothing larger than the
    largest one at every step.

    Args:
        choice: what is measured.
        share: what that takes of the rest of a step.
        budget: largest share that it may take.
        sizes: to choose from, smallest first.
        every: steps between two looks, if that is given.
    """
    least, most = TOLERATED
    if share > most * budget:
        return choice.size != sizes[0] or every is None
    if share < least * budget:
        return choice.size != sizes[-1] or (every is None and choice.every > 1)
    return False


class Clock:
    """Marks points of the work without waiting for them.

    On a CPU the time of this thread, which other programs on the machine do not lengthen; it takes
    part in all parallel work. On CUDA events in the stream.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This point."""
        if not self.on_cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float | None:
        """Between two points; None as long as the device has not reached the second."""
        if not self.on_cuda:
            return end - start
        return start.elapsed_time(end) / 1e3 if end.query() else None


@dataclass
class Ledger:
    """Seconds of steps and of looks, the latest ones that are known.

    Attributes:
        clock: what took the marks.
        rest: seconds of steps, the looks left out.
        looks: seconds of looks.
    """

    clock: Clock
    rest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    looks: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _open: deque[tuple[deque[float], Any, Any]] = field(default_factory=deque)

    def add_step(self, start: Any, end: Any) -> None:
        """A step took from ``start`` to ``end``."""
        self._open.append((self.rest, start, end))

    def add_look(self, start: Any, end: Any) -> None:
        """A look took from ``start`` to ``end``."""
        self._open.append((self.looks, start, end))

    def settle(self) -> None:
        """Enter what has become known."""
        while self._open:
            account, start, end = self._open[0]
            seconds = self.clock.seconds(start, end)
            if seconds is None:
                return
            account.append(seconds)
            self._open.popleft()

    def share(self, every: int) -> float | None:
        """Median look over ``every`` median steps; None while nothing is known."""
        if not self.looks or not self.rest:
            return None
        return statistics.median(self.looks) / (every * max(1e-9, statistics.median(self.rest)))

    def forget(self) -> None:
        """Start new accounts."""
        for account in (self.rest, self.looks, self._open):
            account.clear()
