"""How close are the estimates of every step to the true local constants, over a whole training?

`python -m studies.monitor_quality key=value …` trains as train.py with the same overrides does. At
evenly spaced steps the constant of every branch at the probe text is computed from its dense
Jacobian in float64: largest singular values of the diagonal blocks under a causal certificate,
otherwise ‖J‖ in token_max by a long power method from every output token. The error of an estimate
is 1 − estimate/constant; it is never negative, but for rounding in float32.

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

from invformer.config.load import load_config
from invformer.lipschitz.probe import LipschitzProbe, certified_in
from invformer.nn.transformer import CharTransformer
from invformer.numerics.ball import into_ball
from invformer.runs.exit import guarded
from invformer.runs.run_log import read_rows
from invformer.training.build import build_run
from invformer.training.fit import fit
from invformer.training.monitor import LipschitzMonitor
from invformer.training.plots import save
from studies.report import panels

COMPARISONS = 25
TARGETS = {"median": 0.01, "95th percentile": 0.05}


class Comparison(L.Callback):
    """Computes the true constants after every few steps."""

    def __init__(self, monitor: LipschitzMonitor, every: int) -> None:
        self.monitor, self.every = monitor, every
        self.constants: dict[int, dict[str, float]] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """The constants at the weights that the monitor has just seen."""
        step = trainer.global_step
        if step % self.every == 0 and step not in self.constants:
            self.constants[step] = constants(pl_module.model, self.monitor.inputs)


def constants(model: CharTransformer, tokens: Tensor) -> dict[str, float]:
    """The local constant of every branch, the largest over the sequences."""
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    norm = diagonal_norm if certified_in(model) == "diagonal_block" else token_max_norm
    found: dict[str, float] = {}
    probe = LipschitzProbe(model, tokens)
    for part, at in zip(probe.parts, probe.stacked(), strict=True):
        for name, branch, u in zip(part.names, part.branches, at.inputs, strict=True):
            found[name] = max(
                norm(torch.func.jacrev(branch)(one)) for one in into_ball(u, at.input_radius)
            )
    return found


def diagonal_norm(jacobian: Float[Tensor, "N D N D"]) -> float:
    """max_i ‖∂f_i/∂x_i‖₂."""
    blocks = jacobian.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return torch.linalg.matrix_norm(blocks, 2).max().item()


def token_max_norm(jacobian: Float[Tensor, "N D N D"], num_starts: int = 4) -> float:
    """max_i max_{‖x_j‖ = 1} ‖Σ_j J_ij x_j‖, from left singular vectors and random ones."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.linalg.svd(jacobian.flatten(2), full_matrices=False).U[..., 0]]
    for _ in range(num_starts - 1):
        starts.append(torch.randn(jacobian.shape[:2], generator=generator, dtype=torch.float64))
    a = torch.stack(starts)
    for _ in range(200):
        a = a / a.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        w = torch.einsum("sid,idjk->sijk", a, jacobian)
        x = w / w.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        a = torch.einsum("idjk,sijk->sid", jacobian, x)
    return a.norm(dim=-1).max().item()


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
    every = torch.tensor([value for values in found.values() for value in values])
    result = {
        "median": every.median().item(),
        "95th percentile": every.quantile(0.95).item(),
        "largest": every.max().item(),
        "least": every.min().item(),
    }
    draw(found, sorted(comparison.constants), folder / "quality.png")
    summary = {"comparisons": len(every), **result}
    content = {"summary": summary, "errors": found, "steps": sorted(comparison.constants)}
    (folder / "quality.json").write_text(json.dumps(content, indent=1) + "\n")
    said = [f"{key} {value:.4%}" for key, value in result.items()]
    print(f"{len(every):,} comparisons", *said, sep=", ")


if __name__ == "__main__":
    raise SystemExit(guarded(lambda: main(sys.argv[1:]), debug=False))
