"""Local Lipschitz constants of our own models during training."""

import logging
import math
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.certificate import NoCertificateError
from invformer.nn.proof import certify
from invformer.nn.stack import FoldedStackWeights
from invformer.training.module import CharLanguageModel
from invformer.training.rows import Numbers, record

log = logging.getLogger(__name__)
# So many times the usual rows an estimate advances before these steps, after one of all rows:
# constants change fastest at first, and those of baselines faster.
ROWS = {200: 1.5, math.inf: 0.75}
ROWS_OF_BASELINES = {200: 3.0, math.inf: 1.5}


class BranchMonitor:
    """What :class:`.LipschitzMonitor` does with a :class:`.CharLanguageModel`.

    It estimates every branch, with the weights before a step's update. The row of a step with a
    validation has estimates of the validated weights instead, and local bounds and bounds, which
    are proven, if there are theorems.
    """

    def __init__(
        self,
        module: CharLanguageModel,
        inputs: Tensor,
        seed: int,
        restored: dict[str, Any],
        name: str,
    ) -> None:
        self.module, self.watch = module, Stopwatch(module.device)
        replays = module.graphs.replays
        # With CUDA graphs: the stream beside the backward pass, and the row until the update.
        self.beside = torch.cuda.Stream() if replays else None
        self.early: Numbers = {}
        self.probe = LipschitzProbe(module.model, inputs, seed=seed, replays=replays)
        self.name = name
        self.overhead = "perf/monitor_overhead" + f"/{name}" * (name != "lipschitz")
        places = [*(f"{name}_branches/{branch}" for branch in self.probe.names), name]
        columns = ("estimate", "local_bound", "bound")
        self.keys = {column: tuple(f"{p}/{column}" for p in places) for column in columns}
        if restored:
            try:
                self.probe.load_state_dict(restored)
            except ValueError as error:  # monitor.length, for one, was changed
                log.warning("%s: estimates start anew", error)

    def before_backward(self) -> None:
        """If steps are CUDA graphs, estimate beside the backward pass, which changes no weight."""
        if self.beside is None or not self.module.graphs.replays:
            return
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self.early = self.row(self.module.weights)

    def estimate(self, trainer: L.Trainer) -> None:
        """Estimate with the weights that the training step has used."""
        if self.early and self.beside is not None:
            with self.watch:  # how long training waits for it
                torch.cuda.current_stream().wait_stream(self.beside)
            record(trainer, trainer.global_step, self.early)
            self.early = {}
        else:
            with self.watch:
                step = trainer.global_step
                record(trainer, step, self.row(self.module.weights, times=self.times(step)))

    def times(self, step: int) -> float:
        """So many times the usual rows are advanced at a step."""
        if not self.probe.has_started:
            return self.probe.tokens.shape[-1]
        rows = ROWS if self.probe.model.is_invertible else ROWS_OF_BASELINES
        return next(times for end, times in rows.items() if step < end)

    def validation_starts(self) -> None:
        """Leave the validation out of the time that the monitor's is compared with."""
        self.stopped = self.watch.mark()

    def validate(self, trainer: L.Trainer) -> None:
        """Estimate and bound with the validated weights; the next step's vectors stay the same."""
        step = self.module.step
        with self.watch, torch.inference_mode(False), self.probe.unchanged():
            stacked = self.probe.stacked()
            record(trainer, step, self.row(None, stacked) | self.proven(self.probe, stacked))
        if (share := self.watch.share(self.stopped)) is not None:
            record(trainer, step, {self.overhead: share})

    def row(
        self, weights: FoldedStackWeights | None, stacked: Any = None, times: float = 1.0
    ) -> Numbers:
        """Estimates, as a vector on the device, and the target; None computes the weights."""
        row = self.by_key("estimate", self.probe.values(weights, stacked, times))
        if self.probe.model.is_invertible:
            row[f"{self.name}/target"] = self.probe.target
        return row

    def proven(self, probe: LipschitzProbe, stacked: Any) -> Numbers:
        """Local bounds and bounds of the branches, if there is a theorem for each of them."""
        try:
            per_branch = certify(probe.model).per_branch
        except NoCertificateError:
            return {}
        found = probe.local_bounds(stacked=stacked)
        bounds = found.new_tensor([per_branch[name] for name in probe.names])
        local = torch.minimum(found, bounds)  # what holds everywhere holds here
        return self.by_key("local_bound", local) | self.by_key("bound", bounds)

    def by_key(self, column: str, values: Tensor) -> Numbers:
        """A constant of every branch, and the largest of them, by their keys in metrics.jsonl."""
        return {self.keys[column]: values}

    def state_dict(self) -> dict[str, Any]:
        """The probe's buffers."""
        return self.probe.state_dict()


class Stopwatch:
    """Times what runs inside ``with watch:`` by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.began = self.mark()

    def __exit__(self, *error: object) -> None:
        self.spans.append((self.began, self.mark()))

    def mark(self) -> Any:
        """Now, as the device will see it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two marks."""
        return began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began

    def share(self, until: Any) -> float | None:
        """Seconds inside over seconds outside since the last call; None after one span.

        The time outside begins with the end of the first span, and ends at a mark before the last.
        """
        spans, self.spans = self.spans, []
        if len(spans) < 2:
            return None
        if self.on_gpu:
            spans[-1][1].synchronize()  # the rows that are sent now wait for it anyway
        first, *others, last = spans
        inside = sum(self.seconds(*span) for span in others)
        outside = self.seconds(first[1], until) - inside
        return (inside + self.seconds(*last)) / outside if outside > 0 else None
