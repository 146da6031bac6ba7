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
# What a choice is to take of the budget, by prices that move by some percent from look to look.
AIM = 0.85
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


def is_due(step: int, every: int, local_every: int) -> bool:
    """Whether is looked after an optimiser step, counted from zero.

    Always after the step that a validation follows, and every few steps; once these are as rare as
    validations, the former are enough.
    """
    precedes_validation = (step + 1) % local_every == 0
    return precedes_validation or (every < local_every and step % every == 0)


def looks_per_step(every: int, local_every: int) -> float:
    """How often :func:`is_due` says yes, on average."""
    if every >= local_every:
        return 1 / local_every
    # A step is V − 1 modulo V and 0 modulo E at once only if V and E have no common divisor.
    coincide = 1 / (every * local_every) if math.gcd(every, local_every) == 1 else 0.0
    return 1 / every + 1 / local_every - coincide


@dataclass(frozen=True)
class Price:
    """Seconds of one look, and of the local bounds that come with it before a validation."""

    look: float
    local: float = 0.0

    def per_step(self, every: int, local_every: int) -> float:
        """Seconds of all that is measured, per optimiser step.

        Args:
            every: steps between two looks.
            local_every: steps between two validations.
        """
        return self.look * looks_per_step(every, local_every) + self.local / local_every


def choose(
    prices: dict[Size, Price],
    rest: float,
    budget: float,
    local_every: int,
    every: int | None = None,
) -> Choice:
    """The largest probe that can be measured at every step, or else the smallest, more rarely.

    What is measured before validations counts, but is never left out.

    Args:
        prices: what is measured costs at each size, smallest first.
        rest: seconds of a step without it.
        budget: largest share of ``rest`` that all of it may take.
        local_every: steps between two validations.
        every: steps between two looks, if that is given: larger probes fit then.
    """
    allowed = budget * rest
    fitting = [s for s, p in prices.items() if p.per_step(every or 1, local_every) <= allowed]
    if fitting:
        return Choice(fitting[-1], every or 1)
    smallest, price = next(iter(prices.items()))
    left = max(1e-9, allowed - (price.look + price.local) / local_every)
    return Choice(smallest, every or min(local_every, math.ceil(price.look / left)))


def could_be_better(
    choice: Choice,
    share: float,
    budget: float,
    sizes: list[Size],
    local_every: int,
    every: int | None = None,
) -> bool:
    """Whether a choice takes clearly more or less than the budget, and another one would not.

    There is nothing smaller than the smallest probe at given steps or before validations only, and
    nothing larger than the largest one at every step.

    Args:
        choice: what is measured.
        share: what that takes of the rest of a step.
        budget: largest share that it may take.
        sizes: to choose from, smallest first.
        local_every: steps between two validations.
        every: steps between two looks, if that is given.
    """
    least, most = TOLERATED
    if share > most * budget:
        return choice.size != sizes[0] or (every is None and choice.every < local_every)
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
    """Seconds of steps, of looks and of local bounds, the latest ones that are known.

    Attributes:
        clock: what took the marks.
        rest: seconds of steps, all that is measured left out.
        looks: seconds of looks.
        local: seconds of local bounds.
    """

    clock: Clock
    rest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    looks: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    local: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _open: deque[tuple[deque[float], Any, Any]] = field(default_factory=deque)

    def add_step(self, start: Any, end: Any) -> None:
        """A step took from ``start`` to ``end``."""
        self._open.append((self.rest, start, end))

    def add_look(self, start: Any, end: Any) -> None:
        """A look took from ``start`` to ``end``."""
        self._open.append((self.looks, start, end))

    def add_local(self, start: Any, end: Any) -> None:
        """Local bounds took from ``start`` to ``end``."""
        self._open.append((self.local, start, end))

    def settle(self) -> None:
        """Enter what has become known."""
        while self._open:
            account, start, end = self._open[0]
            seconds = self.clock.seconds(start, end)
            if seconds is None:
                return
            account.append(seconds)
            self._open.popleft()

    def price(self) -> Price | None:
        """Medians of looks and of local bounds, if there were any; None while no look is known."""
        if not self.looks:
            return None
        return Price(statistics.median(self.looks), statistics.median(self.local or [0.0]))

    def rest_of_step(self) -> float | None:
        """Median of steps without what is measured; None while none is known."""
        return statistics.median(self.rest) if self.rest else None

    def share(self, every: int = 1, local_every: int = 1) -> float | None:
        """What is measured per step, of a median step; None while nothing is known.

        Args:
            every: steps between two looks.
            local_every: steps between two validations.
        """
        price, rest = self.price(), self.rest_of_step()
        if price is None or rest is None:
            return None
        return price.per_step(every, local_every) / max(1e-9, rest)

    def forget(self) -> None:
        """Start new accounts, except of local bounds: they are too rare to wait for new ones."""
        for account in (self.rest, self.looks, self._open):
            account.clear()
