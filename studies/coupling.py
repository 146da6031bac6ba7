"""Certified stacks beside additive couplings: the price of the inverse, and how it amplifies.

Run folders are measured as they are. For every depth a small model of each kind is trained on the
same batches, with as many parameters. An error is ‖x̂ − x‖/‖x‖ over all tokens after a forward pass
and the inverse in one format. Singular values are those of the dense Jacobian of the stack from 16
embedded characters, in the ordinary Euclidean norm: the inverse amplifies by 1/σ_min.

Verdict: at every depth the certified stack amplifies less than the coupling does, and in bfloat16
it gives back as many characters or more.
"""

import copy
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.timing import median_seconds
from invformer.assemble.model import build_model
from invformer.config.section import option
from invformer.kernels.attention import only
from invformer.nn.transformer import CharTransformer
from studies.report import Figure, Rows, Summary, as_cell, by, curves, panels, table
from studies.runs import NANOGPT_CPU, nanogpt_cpu, validations
from studies.states import kind_of, trained, undoing, windows
from studies.study import Study, StudyOptions, grid, program
from studies.training import TextCase, TextConfig, scores, train_by_recipe

CHARACTERS = 16  # of the dense Jacobian
WARMUP = 20
PART = 4  # small models have a quarter of the width


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Measure run folders, and small models of several depths."""

    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    depths: list[int] = option([4, 8, 16, 32, 64], "layers of the small models", "[1, 1e3]")
    num_steps: int = option(200, "optimiser steps of the small models", "[1, 1e6]")
    num_windows: int = option(8, "windows that are inverted", "[1, 1e4]")
    num_jacobians: int = option(2, "windows whose Jacobian is taken", "[0, 100]")
    data: TextConfig = field(default_factory=TextConfig)


@dataclass(frozen=True, kw_only=True)
class Case(TextCase):
    """A run folder, or a kind and a depth."""

    model: str
    lr: ClassVar[float] = 5e-3
    muon_lr: ClassVar[float] = 1e-2
    batch_size: ClassVar[int] = 12
    num_layers: int | None
    num_steps: int
    num_windows: int
    num_jacobians: int


@dataclass(frozen=True)
class Result:
    """Loss, price and error of the inverse, and the extreme singular values of the stack."""

    name: str
    parameters: int
    nats: float
    largest: float  # σ_max, of the worst window
    smallest: float  # σ_min, of the worst window
    forward: float | None = None  # seconds
    inverse: float | None = None
    error_float32: float | None = None
    error_bfloat16: float | None = None
    recovered_float32: float | None = None
    recovered_bfloat16: float | None = None


def cases(options: Options) -> list[Case]:
    """The run folders, then every kind at every depth."""
    text = options.data.case_fields(64, options.num_windows)
    return [
        *grid(Case, options, text, num_layers=[None], model=options.models),
        *grid(Case, options, text, num_layers=options.depths, model=NANOGPT_CPU),
    ]


def measure(case: Case, device: torch.device) -> Result:
    """Take or train the model, and measure its inverse."""
    if case.num_layers is None:
        model = trained(case.model).network
        tokens = windows(case.model, case.num_windows)
        nats = min(row["val/nats"] for row in validations(Path(case.model)))  # as of the weights
    else:
        model, tokens, nats = trained_here(case)
    name = kind_of(model)
    inverse = {} if name == "twin" else inverse_of(model, tokens)
    values = [singular_values(model, t[:CHARACTERS]) for t in tokens[: case.num_jacobians]]
    return Result(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        nats=nats,
        largest=max((v.max().item() for v in values), default=math.nan),
        smallest=min((v.min().item() for v in values), default=math.nan),
        **inverse,
    )


@torch.no_grad()
def inverse_of(model: CharTransformer, tokens: Tensor) -> dict[str, Any]:
    """Time in float32, error in float32 and bfloat16."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        network = copy.deepcopy(model).to(dtype)
        x, undo = network.embedding(tokens), undoing(network)
        z = network.stack(x)
        back, name = undo(z), str(dtype).removeprefix("torch.")
        error = (back - x).double().norm() / x.double().norm()
        recovered = (network.embedding.nearest_tokens(back) == tokens).double().mean()
        found |= {f"error_{name}": error.item(), f"recovered_{name}": recovered.item()}
        if dtype == torch.float32:
            work = {"forward": lambda: network.stack(x), "inverse": lambda: undo(z)}  # noqa: B023
            found |= median_seconds(work, 5)
    return found


def singular_values(model: CharTransformer, tokens: Tensor) -> Tensor:
    """Of the dense Jacobian of the stack at a text, in float64."""
    network = copy.deepcopy(model).double()
    x = network.embedding(tokens).detach()
    with only("math"):
        jacobian = torch.func.jacrev(network.stack, chunk_size=256)(x)
    return torch.linalg.svdvals(jacobian.detach().reshape(x.numel(), x.numel()))


@lru_cache(maxsize=1)
def trained_here(case: Case) -> tuple[CharTransformer, Tensor, float]:
    """A small model after training, validation windows and their nats per character."""
    text = case.text
    assert case.num_layers is not None
    torch.manual_seed(case.seed)
    model = build_model(nanogpt_cpu(case.model, case.num_layers, PART), text.vocab_size, 64)
    train_by_recipe(model, case, weight_decay=0.1, warmup_steps=min(WARMUP, case.num_steps))
    model.eval()
    inputs, targets = text.windows(64, torch.device("cpu"))
    with torch.no_grad():
        return model, inputs[: case.num_windows].long(), scores(model, inputs, targets)[0]


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Certified against coupling, at every depth."""
    findings = []
    for depth, group in by(rows, "num_layers").items():
        found = {r.name: r for _, r in group}
        if not {"certified", "coupling"} <= found.keys():
            continue
        ours, theirs = found["certified"], found["coupling"]
        where = "run folders" if depth is None else f"{depth} layers"
        factors = [as_cell(1 / r.smallest) for r in (ours, theirs)]
        shares = [as_cell(r.recovered_bfloat16) for r in (ours, theirs)]
        more = (ours.recovered_bfloat16 or 0) >= (theirs.recovered_bfloat16 or 0)
        findings += [
            (ours.smallest > theirs.smallest, f"{where}: 1/σ_min {' against '.join(factors)}"),
            (more, f"{where}: back in bfloat16 {' against '.join(shares)}"),
        ]
    return Summary(table(rows, more={"1/σ_min": amplification}), findings)


def amplification(case: Case, result: Result) -> float:
    """1/σ_min: the Lipschitz constant of the inverse at the texts."""
    return 1 / result.smallest


AXES = {
    "1/σ_min: how much the inverse amplifies": "log",
    "relative error of the inverse": "log",
    "validation nats per character": "linear",
}


def draw(rows: Rows[Case, Result]) -> Figure:
    """The inverse's constant, errors and loss against depth."""
    small = [row for row in rows if row[0].num_layers is not None]
    figure, axes = panels(1, 3)
    curves(axes[0], small, "num_layers", amplification, ("name",))
    curves(axes[1], small, "num_layers", "error_float32", ("name",), "float32")
    curves(axes[1], small, "num_layers", "error_bfloat16", ("name",), "bfloat16", color="0.6")
    curves(axes[2], small, "num_layers", "nats", ("name",))
    for one, (ylabel, scale) in zip(axes, AXES.items(), strict=True):
        one.set(xlabel="layers", xscale="log", ylabel=ylabel, yscale=scale)
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
