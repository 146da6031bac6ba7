"""Certified stacks beside additive couplings: the price of the inverse, and how it amplifies.

Run folders are measured as they are. For every depth a small model of each kind is trained on the
same batches, with as many parameters. An error is ‖x̂ − x‖/‖x‖ over all tokens after a forward pass
and the inverse in one format. Singular values are those of the dense Jacobian of the stack from 16
embedded characters, in the ordinary Euclidean norm: the inverse amplifies by 1/σ_min.

Verdict: at every depth the certified stack amplifies less than the coupling does, and in bfloat16
it gives back as many characters or more.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from invformer.assemble.model import build_model
from invformer.config.schema import ModelConfig
from invformer.config.section import option, section
from invformer.evaluation.inversion import in_turns
from invformer.kernels.attention import only
from invformer.nn.certificate import certify
from invformer.nn.coupling import CouplingStack
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.training.optimizers import build_optimizer, warmup_cosine
from studies.states import trained, windows
from studies.study import (
    Figure,
    Finding,
    Rows,
    Study,
    StudyOptions,
    Summary,
    as_cell,
    case_of,
    grouped,
    main,
    outcome_of,
    panels,
)
from studies.training import (
    TextCase,
    TextConfig,
    mean_nats,
    text_fields,
    text_of,
    train,
    validation_windows,
)

CHARACTERS = 16  # of the dense Jacobian
WARMUP = 20
# As many parameters each: the shapes of experiment=nanogpt_cpu_causal and its baselines, a quarter.
SMALL: dict[str, dict[str, Any]] = {
    "contractive_bounded": {
        "certificate": "causal", "strictly_causal": True, "d_model": 40, "num_heads": 4, "d_ff": 74,
    },
    "plain": {  # without diagonal scalings
        "name": "contractive_bounded", "certificate": "causal", "strictly_causal": True,
        "d_model": 40, "num_heads": 4, "d_ff": 76, "diagonal_scaling": False,
    },
    "reversible": {"certificate": None, "d_model": 32, "num_heads": 2, "d_ff": 122},
    "dot_product": {"certificate": None, "d_model": 32, "num_heads": 2, "d_ff": 128},
}  # fmt: skip


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Measure run folders, and small models of several depths."""

    program: ClassVar[str] = "-m studies.coupling"
    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    depths: list[int] = option([4, 8, 16, 32, 64], "layers of the small models", "[1, 1e3]")
    kinds: list[str] = option(list(SMALL), "of the small models")
    num_steps: int = option(200, "optimiser steps of the small models", within="[1, 1e6]")
    muon_lr: float = option(1e-2, "peak learning rate of Muon", within="(0, 10]")
    num_windows: int = option(8, "windows that are inverted", within="[1, 1e4]")
    num_jacobians: int = option(2, "windows whose Jacobian is taken", within="[0, 100]")
    data: TextConfig = section(TextConfig)


@dataclass(frozen=True, kw_only=True)
class Case(TextCase):
    """A run folder, or a kind and a depth."""

    model: str
    num_layers: int | None
    num_steps: int
    muon_lr: float
    num_windows: int
    num_jacobians: int


@dataclass(frozen=True)
class Result:
    """Loss, price and error of the inverse, and the extreme singular values of the stack."""

    name: str
    parameters: int
    nats: float
    forward: float | None  # seconds
    inverse: float | None
    error_float32: float | None
    error_bfloat16: float | None
    recovered_float32: float | None
    recovered_bfloat16: float | None
    largest: float  # σ_max, of the worst window
    smallest: float  # σ_min, of the worst window


def cases(options: Options) -> list[Case]:
    """The run folders, then every kind at every depth."""
    text = text_fields(options.data, 64, options.num_windows)
    small = [(kind, depth) for depth in options.depths for kind in options.kinds]
    asked: list[tuple[str, int | None]] = [(folder, None) for folder in options.models]
    return [
        case_of(Case, options, model=model, num_layers=depth, **text)
        for model, depth in [*asked, *small]
    ]


def measure(case: Case, device: torch.device) -> Result:
    """Take or train the model, and measure its inverse."""
    del device
    if case.num_layers is None:
        model, tokens = trained(case.model).network, windows(case.model, case.num_windows)
        name, nats = trained(case.model).config.model.name, last_nats(case.model)
    else:
        model, tokens, nats = trained_here(case)
        name = case.model
    inverse = Inverse()
    if name != "dot_product":
        inverse = inverse_of(model, tokens)
    values = [singular_values(model, t[:CHARACTERS]) for t in tokens[: case.num_jacobians]]
    return Result(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        nats=nats,
        largest=max((v.max().item() for v in values), default=float("nan")),
        smallest=min((v.min().item() for v in values), default=float("nan")),
        **vars(inverse),
    )


@dataclass
class Inverse:
    """What :class:`Result` says of an inverse."""

    forward: float | None = None
    inverse: float | None = None
    error_float32: float | None = None
    error_bfloat16: float | None = None
    recovered_float32: float | None = None
    recovered_bfloat16: float | None = None


@torch.no_grad()
def inverse_of(model: CharTransformer, tokens: Tensor) -> Inverse:
    """Time in float32, error in float32 and bfloat16."""
    found = Inverse()
    for dtype in (torch.float32, torch.bfloat16):
        network = copy.deepcopy(model).to(dtype)
        x, undo = network.embedding(tokens), undoing(network, dtype)
        z = network.stack(x)
        back, name = undo(z), str(dtype).removeprefix("torch.")
        error = (back - x).double().norm() / x.double().norm()
        recovered = (network.embedding.nearest_tokens(back) == tokens).double().mean()
        setattr(found, f"error_{name}", error.item())
        setattr(found, f"recovered_{name}", recovered.item())
        if dtype == torch.float32:
            work = {"forward": lambda: network.stack(x), "inverse": lambda: undo(z)}  # noqa: B023
            vars(found).update(in_turns(work, 5))
    return found


def undoing(network: CharTransformer, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """z ↦ x, with everything that does not depend on z computed before."""
    stack = network.stack
    if isinstance(stack, CouplingStack):
        return stack.inverse
    assert isinstance(stack, InvertibleStack)
    weights, certificate = stack.weights(), certify(network, dtype=dtype)
    return lambda z: stack.inverse(z, weights, certificate, throw=False, evidence=False).value


def singular_values(model: CharTransformer, tokens: Tensor) -> Tensor:
    """Of the dense Jacobian of the stack at a text, in float64."""
    network = copy.deepcopy(model).double()
    x = network.embedding(tokens).detach()
    with only("math"):
        jacobian = torch.func.jacrev(network.stack, chunk_size=256)(x)
    return torch.linalg.svdvals(jacobian.detach().reshape(x.numel(), x.numel()))


def last_nats(folder: str) -> float:
    """The last validation of a run."""
    lines = (Path(folder).expanduser() / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["val/nats"] for row in map(json.loads, lines) if "val/nats" in row][-1]


@lru_cache(maxsize=1)
def trained_here(case: Case) -> tuple[CharTransformer, Tensor, float]:
    """A small model after training, validation windows and their nats per character."""
    text = text_of(case)
    assert case.num_layers is not None
    torch.manual_seed(case.seed)
    shape = {"name": case.model, "num_layers": case.num_layers, **SMALL[case.model]}
    model = build_model(ModelConfig(**shape), text.vocab_size, 64)
    rates: dict[str, Any] = {"lr": 5e-3, "muon_lr": case.muon_lr, "weight_decay": 0.1}
    optimiser = build_optimizer(model, "muon", betas=(0.9, 0.99), **rates)
    train(
        model, text.train, optimiser, num_steps=case.num_steps, batch_size=12, seed=case.seed,
        schedule=warmup_cosine(optimiser, min(WARMUP, case.num_steps), case.num_steps),
        grad_clip=1.0,
    )  # fmt: skip
    model.eval()
    inputs, targets = validation_windows(text, 64, torch.device("cpu"))
    with torch.no_grad():
        return model, inputs[: case.num_windows].long(), mean_nats(model, inputs, targets)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """A line per model, and the comparison at every depth."""
    table: list[dict[str, Any]] = [
        {
            "model": result.name,
            "layers": case.num_layers or "run folder",
            "parameters": result.parameters,
            "nats": result.nats,
            "inverse / forward": result.inverse and result.inverse / (result.forward or 1.0),
            "error, float32": result.error_float32,
            "error, bfloat16": result.error_bfloat16,
            "back, float32": result.recovered_float32,
            "back, bfloat16": result.recovered_bfloat16,
            "σ_max": result.largest,
            "1/σ_min": 1 / result.smallest,
        }
        for case, result in rows
    ]
    findings: list[Finding] = []
    for depth, group in grouped(rows, lambda row: row[0].num_layers).items():
        by_name = {r.name: r for _, r in group}
        if not {"contractive_bounded", "reversible"} <= by_name.keys():
            continue
        ours, theirs = by_name["contractive_bounded"], by_name["reversible"]
        where = "run folders" if depth is None else f"{depth} layers"
        factors = [as_cell(1 / r.smallest) for r in (ours, theirs)]
        shares = [as_cell(r.recovered_bfloat16) for r in (ours, theirs)]
        findings += [
            (ours.smallest > theirs.smallest, f"{where}: 1/σ_min {' against '.join(factors)}"),
            (
                (ours.recovered_bfloat16 or 0) >= (theirs.recovered_bfloat16 or 0),
                f"{where}: back in bfloat16 {' against '.join(shares)}",
            ),
        ]
    paper = "such inverses can explode (Behrmann et al. 2021, images)"
    why = "certified against coupling at every depth, one seed"
    words = "; ".join(words for _, words in findings)
    return Summary(table, paper, words, outcome_of(findings), why)


def draw(rows: Rows[Case, Result]) -> Figure:
    """The inverse's constant, errors and loss against depth."""
    small = [(c, r) for c, r in rows if c.num_layers is not None]
    figure, axes = panels(1, 3)
    for (name, group), style in zip(
        grouped(small, lambda row: row[1].name).items(), ("-o", "-.x", "--s", ":^"), strict=False
    ):
        depths = [c.num_layers or 0 for c, _ in group]
        axes[0].plot(depths, [1 / r.smallest for _, r in group], style, color="0", label=name)
        axes[2].plot(depths, [r.nats for _, r in group], style, color="0", label=name)
        if name != "dot_product":
            for field, color in (("error_float32", "0"), ("error_bfloat16", "0.6")):
                words = f"{name}, {field.removeprefix('error_')}"
                errors = [getattr(r, field) for _, r in group]
                axes[1].plot(depths, errors, style, color=color, label=words)
    titles = ("1/σ_min of the stack, 16 characters", "relative error of the inverse", "nats")
    for one, title in zip(axes, titles, strict=True):
        one.set(title=title, xlabel="layers", xscale="log")
        one.legend()
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
