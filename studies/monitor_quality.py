"""How close are the estimates of every step to the true local constants, over a whole training?

`python -m studies.monitor_quality key=value …` trains as train.py with the same overrides does. At
some steps, four of them among the first 200, the constant of every branch at the probe text is
computed in float64: largest singular values of maps of single tokens, and of the diagonal blocks
under a causal certificate; otherwise ‖J‖ in token_max from below, from every output token the best
of 8 starts, converged. The error of an estimate is 1 − estimate/constant; it is never negative,
but for rounding in float32.

Leaves `quality.json` and `quality.png` in the run's folder.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.jacobian import StackedBranches
from invformer.config.load import load_config
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.transformer import CharTransformer
from invformer.numerics.ball import into_ball
from invformer.processes.exit import guarded
from invformer.report.plots import save
from invformer.runs.run_log import read_rows
from invformer.training.build import build_run
from invformer.training.fit import fit
from invformer.training.monitor import LipschitzMonitor
from studies.report import panels

COMPARISONS = 10
EARLY = (20, 50, 100, 150)
TARGETS = {"median": 0.01, "95th percentile": 0.05}
STARTS, LAST_STEPS = 8, 40


class Comparison(L.Callback):
    """Computes the true constants at some steps."""

    def __init__(self, monitor: LipschitzMonitor, every: int) -> None:
        self.monitor, self.every = monitor, every
        self.constants: dict[int, dict[str, float]] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """The constants at the weights that the monitor has just seen."""
        step = trainer.global_step
        if (step in EARLY or step % self.every == 0) and step not in self.constants:
            self.constants[step] = constants(pl_module.model, self.monitor.inputs)


@torch.no_grad()
def constants(model: CharTransformer, tokens: Tensor, num_starts: int = STARTS) -> dict[str, float]:
    """The local constant of every branch, the largest over the sequences."""
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    probe = LipschitzProbe(model, tokens)
    found = dict(zip(probe.names, from_below(model, tokens, num_starts).tolist(), strict=True))
    for part, at in zip(probe.parts, probe.stacked(), strict=True):
        if part.branches[0].is_token_wise:
            inputs = [into_ball(u, at.input_radius).flatten(0, 1) for u in at.inputs]
            blocks = torch.stack(list(map(jacobians, part.branches, inputs)))
        elif probe.measured == "diagonal_block":
            blocks = diagonal_blocks(at, tokens)
        else:
            continue
        largest = torch.linalg.matrix_norm(blocks, 2).amax(-1)
        found |= dict(zip(part.names, largest.tolist(), strict=True))
    return found


def from_below(model: CharTransformer, tokens: Tensor, num_starts: int) -> Tensor:
    """The best of some starts from every token, and so many more steps for the best of each."""
    best: list[dict[str, Tensor]] = []
    probe = LipschitzProbe(model, tokens)
    for seed in range(num_starts):
        probe = LipschitzProbe(model, tokens, seed=seed)
        for iteration in probe.iterations:
            every = torch.arange(tokens.shape[-1])
            iteration.slots = every.expand(*iteration.slots.shape[:2], -1)
        probe.values()
        states = [iteration.state_dict() for iteration in probe.iterations]
        best = best or states
        for held, new in zip(best, states, strict=True):
            better = new["lengths"] > held["lengths"]
            held["left"].copy_(torch.where(better[..., None], new["left"], held["left"]))
            held["lengths"].copy_(torch.where(better, new["lengths"], held["lengths"]))
    for held, iteration in zip(best, probe.iterations, strict=True):
        iteration.left.copy_(held["left"])
    return torch.stack([probe.values() for _ in range(LAST_STEPS)]).amax(0)


def jacobians(branch: Any, x: Float[Tensor, "R D"]) -> Float[Tensor, "R D D"]:
    """∂f/∂x at every token, of a map of single tokens."""
    return torch.func.vmap(torch.func.jacrev(lambda token: branch(token[None])[0]))(x)


def diagonal_blocks(at: StackedBranches, tokens: Tensor) -> Float[Tensor, "branches R D D"]:
    """∂f_i/∂x_i of every token of every sequence, from products with unit vectors."""
    count, width = len(at.inputs), at.inputs[0].shape[-1]
    chosen = torch.arange(tokens.shape[-1]).expand(count, *tokens.shape)
    jvp = at.rows(chosen, diagonal=True).jvp
    units = torch.eye(width, dtype=torch.float64).expand(count, tokens.numel(), 1, width, width)
    return torch.stack([jvp(unit.clone()) for unit in units.unbind(-1)], -1)


def errors(rows: list[dict], true: dict[int, dict[str, float]]) -> dict[str, list[float]]:
    """1 − estimate/constant of every branch, in the order of the steps compared."""
    estimates = {row["step"]: row for row in rows}
    return {
        name: [
            1 - estimates[step][f"lipschitz_branches/{name}/estimate"] / true[step][name]
            for step in sorted(true)
        ]
        for name in next(iter(true.values()))
    }


def draw(found: dict[str, list[float]], steps: list[int], path: Path) -> None:
    """The error of every branch, and the targets."""
    figure, (axes,) = panels(1, 1)
    for name, values in found.items():
        style = "-" if name.endswith("attention") else "--"
        shown = [max(100 * value, 1e-4) for value in values]
        axes.plot(steps, shown, style, linewidth=1, label=name.replace("_", " "))
    for line, (name, target) in zip(":-", TARGETS.items(), strict=True):
        axes.axhline(100 * target, color="black", linestyle=line, label=f"goal for the {name}")
    axes.set(
        xlabel="optimiser step", ylabel="estimate below the constant, %", yscale="log",
        ylim=(1e-4, 100),
    )  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    save(figure, path)


def main(argv: list[str]) -> None:
    """Train, compare, print a row."""
    config = load_config(argv)
    run = build_run(config)
    callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
    monitor = run.callback(LipschitzMonitor)
    comparison = Comparison(monitor, max(1, config.trainer.max_steps // COMPARISONS))
    callbacks.insert(callbacks.index(monitor) + 1, comparison)
    fit(run)
    folder = run.directory.path
    found = errors(read_rows(run.directory.metrics), comparison.constants)
    steps = sorted(comparison.constants)
    pairs = [pair for values in found.values() for pair in zip(steps, values, strict=True)]
    every = torch.tensor([value for _, value in pairs])
    result = {
        "median": every.median().item(),
        "95th percentile": every.quantile(0.95).item(),
        "largest": every.max().item(),
        "largest in the first 200 steps": max(value for step, value in pairs if step < 200),
        "least": every.min().item(),
    }
    draw(found, steps, folder / "quality.png")
    summary = {"comparisons": len(every), **result}
    content = {"summary": summary, "errors": found, "steps": steps}
    (folder / "quality.json").write_text(json.dumps(content, indent=1) + "\n")
    said = [f"{key} {value:.4%}" for key, value in result.items()]
    print(f"{len(every):,} comparisons", *said, sep=", ")


if __name__ == "__main__":
    raise SystemExit(guarded(lambda: main(sys.argv[1:]), debug=False))
