"""Timing several pieces of work against each other, in turns, on a machine that is not quiet."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP = 1
# A turn lasts at least this long, in seconds: shorter work is repeated within it, as a training
# loop repeats its step, with its own weights and memory at hand and not those of the neighbour.
SHORTEST_TURN = 1.0


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Of some values; one value is its own spread."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def to_list(self) -> list[float]:
        """Median, lower and upper quartile, to four digits."""
        return [float(f"{value:.4g}") for value in (self.median, self.low, self.high)]


def in_turns(
    work: dict[str, Callable[[], object]],
    seconds: float,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each piece of work, turn by turn: A B C C B A A B C …

    What the machine does besides hits neighbours alike: only ratios within one turn mean much.

    Args:
        work: the pieces by name.
        seconds: how long to go on, at least three turns.
        device: what has to finish before the clock is read.
        clock: ``time.process_time`` leaves out what other programs take, of one thread's work.
    """
    repeats = {name: calls_per_turn(call, device) for name, call in work.items()}
    found: dict[str, list[float]] = {name: [] for name in work}
    end = time.perf_counter() + seconds
    names = list(work)
    while time.perf_counter() < end or len(found[names[0]]) < 3:
        for name in names:
            began = clock()
            for _ in range(repeats[name]):
                work[name]()
            finish(device)
            found[name].append((clock() - began) / repeats[name])
        names.reverse()
    return found


def calls_per_turn(call: Callable[[], object], device: torch.device) -> int:
    """Warm up; how often to call within one turn."""
    for _ in range(WARM_UP):
        call()
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    return max(1, round(SHORTEST_TURN / max(1e-6, time.perf_counter() - began)))


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    work: dict[str, Callable[[], object]],
    turns: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a call of each, one after the other in each turn, by the clock."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    for name, call in [*work.items()] * turns:
        finish(device)
        start = clock()
        call()
        finish(device)
        taken[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def paired(base: list[float], other: list[float]) -> Spread:
    """How many times as fast as ``base`` the other was, turn by turn."""
    return Spread.of([b / o for b, o in zip(base, other, strict=True)])
