"""How fast: steps, whole runs and the monitor in them, a validation."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.gpu.machine import Machine, Row, at_most

LENGTHS = (256, 1024, 4096, 8192)
CHARACTERS = 16384  # a step
VARIANTS = ("contractive_l2", "contractive_bounded", "dot_product", "plain")


def case_of(machine: Machine, tokens: int) -> Any:
    """nanoGPT's GPU size; on a processor next to nothing."""
    from benchmarks.models import Case

    if machine.is_gpu:
        return Case(tokens, 384, 6, 6, CHARACTERS // tokens)
    return Case(tokens // 32, 32, 2, 2, 2)


def steps(machine: Machine) -> Iterator[Row]:
    """Training steps under bf16; ``python -m benchmarks`` measures memory too."""
    from benchmarks.models import build
    from benchmarks.tasks import Training

    for tokens in LENGTHS if machine.is_gpu else LENGTHS[:1]:
        case = case_of(machine, tokens)
        with machine.rules():
            work: dict[str, Callable[[], object]] = {
                name: Training(build(name, case, machine.device), case, "bf16") for name in VARIANTS
            }
            found = machine.seconds(work)
        for name, seconds in found.items():
            rate = case.characters / seconds
            yield Row("characters per second", f"{name}, {case.name}", rate)
        ratio = found["contractive_l2"] / found["dot_product"]
        check = "contractive_l2 over dot_product"
        if tokens == LENGTHS[0]:  # the size that has a limit
            yield judged(machine, check, case.name, ratio, 1.0)
        else:
            yield Row(check, case.name, ratio)


def monitor(machine: Machine) -> Iterator[Row]:
    """Runs of nanoGPT's GPU size, in which the monitor is on and off in turns."""
    import lightning as L

    from invformer.training.monitor import LipschitzMonitor
    from tests.gpu.checks import training, weights_after

    span, turns = (40, 15) if machine.is_gpu else (2, 3)

    class Turns(L.Callback):
        """Seconds a step of spans with the monitor at every step, and without it."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step % span:
                return
            machine.finish()
            now = time.perf_counter()
            self.seconds.append((now - getattr(self, "began", now)) / span)
            watch = next(c for c in trainer.callbacks if isinstance(c, LipschitzMonitor))
            watch.every = 1 if watch.every > 1 else 10**9
            self.began = time.perf_counter()

    steps = span * (turns + 1)
    words = [f"trainer.max_steps={steps}", f"trainer.val_every={steps}"]
    if machine.is_gpu:
        words += [
            "trainer.precision=bf16-mixed", "model.d_model=384", "model.num_layers=6",
            "model.num_heads=6", "data.seq_len=256", "data.batch_size=64",
            "data.max_characters=1000000",
        ]  # fmt: skip
    for name in ("contractive_l2", "dot_product"):
        watch = Turns()
        with machine.rules():
            weights_after(training(machine, f"{name}-turns", f"model={name}", *words), watch)
        # The first span, with the monitor, warms up.
        off, on = (statistics.median(watch.seconds[first::2]) for first in (1, 2))
        yield Row("a step of train.py", f"{name}, monitored", 1e3 * on, note="ms")
        yield Row("a step of train.py", name, 1e3 * off, note="ms")
        yield judged(machine, "monitor's overhead", name, on / off - 1, 0.03)


def judged(machine: Machine, check: str, case: str, value: float, limit: float) -> Row:
    """A duration passes or fails on a GPU; on a processor it is only said."""
    if machine.is_gpu:
        return at_most(check, case, value, limit)
    return Row(check, case, value, limit, "not run", "needs a GPU; a processor's duration")


def validation(machine: Machine) -> Iterator[Row]:
    """Certificate, local bounds, an inversion and 100,000 characters, beside 250 steps."""
    from benchmarks.models import build, windows
    from benchmarks.tasks import Training, arithmetic
    from invformer.evaluation.inversion import round_trip
    from invformer.evaluation.likelihood import window_nats
    from invformer.kernels.cuda_graph import Replayed
    from invformer.lipschitz.probe import LipschitzProbe
    from invformer.nn import certify
    from invformer.nn.stack import StackWeights
    from invformer.weights.spectral import set_manual_refresh

    case = case_of(machine, LENGTHS[0])
    model: Any = build("contractive_l2", case, machine.device)
    set_manual_refresh(model)  # as in training
    text, targets = windows(case, machine.device)
    probe = LipschitzProbe(model, text[:1, :8])
    scored = torch.ones_like(targets, dtype=torch.bool)
    batches = 100_000 // case.characters if machine.is_gpu else 1

    def launched(weights: StackWeights) -> torch.Tensor:
        return window_nats(model(text, weights), targets, scored)

    nats = Replayed(launched) if machine.is_gpu else launched  # as the module has it

    def validate() -> None:
        certify(model)
        probe.local_bounds()
        round_trip(model, text[:4], torch.float64).reconstruction()
        with torch.inference_mode():
            weights = model.weights(folded=True)
            for _ in range(batches):
                with arithmetic(machine.device, "bf16"):
                    nats(weights)

    step = Training(build("contractive_l2", case, machine.device), case, "bf16")
    with machine.rules():
        found = machine.seconds({"validation": validate, "step": step})
    share = found["validation"] / (250 * found["step"])
    yield judged(machine, "validation over 250 steps", case.name, share, 0.1)
