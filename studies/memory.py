"""Peak memory and time of a training step: storing, checkpointing, recomputing by the inverse.

A backward pass can recompute every block's input from its output, a coupling's in one pass, a
certified block's by a fixed point. Every case runs in a process of its own, whose largest resident
memory above that before the step is the peak.

Verdict: for the certified model, checkpointing takes less time than the inverse, at no more than
1.2 times its memory; then nobody should train it by the inverse.
"""

import multiprocessing
import re
import resource
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from invformer.assemble.model import build_model
from invformer.config.section import option
from invformer.nn.coupling import CouplingBlock
from invformer.nn.proof import certify
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from invformer.nn.stack import full_name
from invformer.nn.transformer import CharTransformer
from studies.report import Figure, Finding, Rows, Summary, by, curves, panels, table
from studies.runs import nanogpt_cpu
from studies.study import Study, StudyOptions, grid, program
from studies.training import mean_nats

Strategy = Literal["store", "checkpoint", "inverse"]
VOCAB, SEQ_LEN = 51, 64
KINDS = ("certified", "coupling")


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Take training steps of both kinds in three ways."""

    depths: list[int] = option([4, 16], "layers", "[1, 1e3]")
    batch_size: int = option(64, "windows of 64 characters", "[1, 1e5]")
    repeats: int = option(3, "steps; the median is reported", "[1, 1e3]")


@dataclass(frozen=True)
class Case:
    """One kind, depth and strategy."""

    kind: str
    num_layers: int
    strategy: Strategy
    batch_size: int
    repeats: int
    seed: int
    num_threads: int | None


@dataclass(frozen=True)
class Result:
    """Largest resident memory above that before, MiB; seconds a step; error of the gradient."""

    peak: float
    time: float
    gradient_error: float  # relative to that of the stored activations


def cases(options: Options) -> list[Case]:
    """Every kind at every depth, in three ways."""
    strategies = get_args(Strategy)
    return grid(Case, options, num_layers=options.depths, kind=KINDS, strategy=strategies)


def measure(case: Case, device: torch.device) -> Result:
    """In a fresh process, so that its largest memory is that of this case."""
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # only this process ends by Ctrl-C
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        signal.signal(signal.SIGINT, heard)
        return pool.apply(measured, (case,))


def measured(case: Case) -> Result:
    """Some steps, their peak memory and their time; then the gradient of the stored activations."""
    torch.set_num_threads(case.num_threads or torch.get_num_threads())
    torch.manual_seed(case.seed)
    model = build_model(nanogpt_cpu(case.kind, case.num_layers), VOCAB, SEQ_LEN)
    tokens = torch.randint(VOCAB, (case.batch_size, SEQ_LEN))
    model.initialise(tokens[:1])
    step(model, tokens[:1], case.strategy)  # libraries take their memory
    before, seconds = resident(), []
    for _ in range(case.repeats):
        start = time.perf_counter()
        step(model, tokens, case.strategy)
        seconds.append(time.perf_counter() - start)
    peak, gradient = resident() - before, gradient_of(model)
    step(model, tokens, "store")
    error = (gradient - gradient_of(model)).norm() / gradient_of(model).norm()
    return Result(peak, statistics.median(seconds), error.item())


def resident() -> float:
    """Largest resident memory of this process so far, MiB; ru_maxrss begins at its parent's."""
    status = Path("/proc/self/status")
    if not status.exists():  # on a Mac, whose ru_maxrss is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (kibibytes,) = re.findall(r"VmHWM:\s*(\d+)", status.read_text("utf-8"))
    return int(kibibytes) / 1024


def gradient_of(model: CharTransformer) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def step(model: CharTransformer, tokens: Tensor, strategy: Strategy) -> None:
    """Gradients of the mean cross-entropy of a batch with itself as the target."""
    model.zero_grad()
    if strategy != "inverse":
        model.stack.checkpoint_activations = strategy == "checkpoint"
        mean_nats(model(tokens, folded=True), tokens).backward()
        return
    x = model.embedding(tokens)
    with torch.no_grad():
        z = model.stack(x)
    undo = undoing(model)
    z = z.detach().requires_grad_()
    mean_nats(model.predict(z), tokens).backward()
    gradient = z.grad
    for index in reversed(range(len(model.stack.blocks))):
        block = model.stack.blocks[index]
        with torch.no_grad():
            z = undo(index, block, z)
        z = z.detach().requires_grad_()
        block(z).backward(gradient)
        gradient = z.grad
    x.backward(gradient)


def undoing(model: CharTransformer) -> Any:
    """(index, block, output) ↦ input of the block."""
    if not model.is_invertible:
        return lambda index, block, z: cast(CouplingBlock, block).inverse(z)
    with torch.no_grad():
        weights, certificate = model.weights(), certify(model)
    assert weights is not None

    def undo(index: int, block: InvertibleBlock, z: Tensor) -> Tensor:
        for name, layer in reversed(list(block.layers())):
            full = full_name(index, name)
            assert isinstance(layer, InvertibleResidual)
            z = layer.inverse(
                z, weights[full], lipschitz_bound=certificate.per_branch[full],
                kind="causal", throw=False, evidence=False,
            ).value  # fmt: skip
        return z

    return undo


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Who wins at each depth."""
    findings: list[Finding] = []
    for (kind, depth), group in by(rows, "kind", "num_layers").items():
        found = {case.strategy: result for case, result in group}
        saved, inverse = found["checkpoint"], found["inverse"]
        words = (
            f"{kind}, {depth} layers: the inverse takes {inverse.time / saved.time:.2f} times the "
            f"time of checkpointing, and {inverse.peak:.0f} instead of {saved.peak:.0f} MiB"
        )
        wins = saved.time < inverse.time and saved.peak < 1.2 * inverse.peak
        findings.append((wins if kind == "certified" else None, words))
    return Summary(table(rows), findings)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Peak memory against time of a step."""
    figure, (axes,) = panels(1, 1)
    curves(axes, rows, "time", "peak", ("kind", "strategy"))
    axes.set(xlabel="seconds a training step", ylabel="peak memory, MiB", xscale="log")
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
