"""What do the estimates of every step cost a training? Turns of ten steps with and without them.

`python -m benchmarks.monitor_cost key=value …` trains as train.py with the same overrides does, but
the monitor rests in every other turn. In windows of 100 steps the medians of both kinds of steps
are compared; steps that send rows or are followed by a validation do not count. Nothing else should
run meanwhile: single windows differ by several per cent.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from invformer.commands import run
from invformer.config.schema import TrainConfig
from invformer.errors import ConfigurationError

TURN, WINDOW = 10, 100
NEVER = sys.maxsize


def is_watched(step: int) -> bool:
    """Whether the monitor estimates at a step."""
    return step // TURN % 2 == 0


def costs(seconds: Mapping[int, float]) -> list[float]:
    """What steps with estimates take more than those without, as a share, window by window."""
    found = []
    for first in range(WINDOW, max(seconds, default=0) - WINDOW + 2, WINDOW):
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(first, first + WINDOW):
            if step in seconds:
                times[is_watched(step)].append(seconds[step])
        if times[True] and times[False]:
            found.append(statistics.median(times[True]) / statistics.median(times[False]) - 1)
    return found


def measure(config: TrainConfig) -> None:
    """Train, and print the mean of the windows, its standard error, and the time of a step."""
    import lightning as L

    from invformer.training.build import build_run
    from invformer.training.fit import fit
    from invformer.training.monitor import LipschitzMonitor

    trained = build_run(config)
    monitor = trained.callback(LipschitzMonitor)
    if monitor is None:
        raise ConfigurationError("monitor.enabled: without a monitor there is nothing to time")
    began: dict[int, float] = {}

    class Turns(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            began.setdefault(trainer.global_step, time.perf_counter())
            monitor.every = 1 if is_watched(trainer.global_step) else NEVER

    trained.trainer.callbacks.insert(0, Turns())  # type: ignore[attr-defined]
    fit(trained)
    pauses = config.monitor.flush_every, config.trainer.val_every
    seconds = {
        step: began[step + 1] - began[step]
        for step in began
        if step + 1 in began and all((step + 1) % every for every in pauses)
    }
    found = costs(seconds)
    if len(found) < 2:
        raise ConfigurationError(
            f"fewer than two windows of {WINDOW} steps were timed: choose another run.name, and "
            f"trainer.max_steps={4 * WINDOW} or more"
        )
    error = statistics.stdev(found) / len(found) ** 0.5
    alone = statistics.median(s for step, s in seconds.items() if not is_watched(step))
    print(
        f"estimates take {statistics.mean(found):.1%} ± {error:.1%} of a step's "
        f"{1000 * alone:.1f} ms, in {len(found)} windows"
    )


if __name__ == "__main__":
    run(TrainConfig, measure)  # type: ignore[arg-type]
