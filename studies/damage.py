"""Text back from damaged states: what comes back, and what is proven.

The top states of validation windows are rounded, made noisy, or lose channels. The text is sought
by the inverse of all positions at once, and by trying every symbol at every position, as
``invert.py`` does.

Proven is what :func:`.prefix_margins` proves of the text found by trying every symbol, if it is
known how far a state or its entries may be off: no other text has such states. Damage is beyond the
radius if a true state is not within m − δ of the one given (docs/numerics.md, 19), which needs no
such knowledge.

Verdict: no character with a proof is wrong.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

import invformer
from invformer.config.section import option
from invformer.data.corpora import read_corpus
from invformer.nn.coupling import CouplingStack
from invformer.nn.proof import certify
from invformer.proofs.prefix_margins import prefix_margins
from invformer.trained.model import TrainedModel, preimage_of
from invformer.trained.states import perturb
from studies.report import Figure, Rows, Summary, by, curves, look_of, panels, table, values
from studies.study import Study, StudyOptions, case_of, program

SLACK = 1e-9  # more than what float64 rounds in a state


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Damage the states of trained models and bring the text back."""

    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    bits: list[int] = option([16, 8, 6, 5, 4, 3, 2, 1], "of rounding", "[1, 32]")
    noise: list[float] = option([0.1, 0.3, 1.0], "of the states' RMS length", "[0, 1e3]")
    dropped: list[int] = option([1, 4, 32], "channels that are set to zero", "[1, 1e5]")
    num_windows: int = option(4, "windows of the validation split", "[1, 1e5]")


@dataclass(frozen=True)
class Case:
    """One model under one damage."""

    model: str
    damage: str
    level: float
    num_windows: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Shares of characters."""

    name: str
    at_once: float | None  # without an inverse None
    search: float
    proven: float
    wrong: float  # proven, though they are not those of the text
    beyond_radius: float  # how often the damage exceeds the radius of the prefix margins
    margin: float  # median of m_i, of the states' root mean square length


def cases(options: Options) -> list[Case]:
    """Every damage of every model."""
    levels = {
        "bits": options.bits, "channel bits": options.bits, "noise": options.noise,
        "dropped": options.dropped,
    }  # fmt: skip
    return [
        case_of(Case, options, model=model, damage=damage, level=float(level))
        for model in options.models
        for damage in levels
        for level in levels[damage]
    ]


@lru_cache(maxsize=4)
def trained(folder: str) -> TrainedModel:
    """The model of a run folder, in float64."""
    model = invformer.load(folder, "cpu")
    model.network.double()
    return model


@lru_cache(maxsize=4)
def windows(folder: str, count: int) -> Integer[Tensor, "windows tokens"]:
    """Windows spread evenly over the validation split of the model's own text."""
    model = trained(folder)
    text = model.vocabulary.encode(read_corpus(model.config.data).split("val")).long()
    whole = text.unfold(0, model.network.seq_len, model.network.seq_len)
    return whole[torch.linspace(0, len(whole) - 1, count).long()]


def damaged(z: Tensor, case: Case) -> tuple[Tensor, dict[str, Any]]:
    """The states of every window after the damage, and how far they may be off."""
    if case.damage in ("bits", "channel bits"):
        over = (1, 2) if case.damage == "bits" else (0, 1)  # a scale a window, or a channel
        least, largest = z.amin(over, keepdim=True), z.amax(over, keepdim=True)
        step = (largest - least) / (2 ** int(case.level) - 1)
        off = (step / 2).expand(len(z), -1, -1) + SLACK
        return least + ((z - least) / step).round() * step, {"entries_within": off}
    if case.damage == "noise":
        found = [perturb(w, case.level, None, case.seed + i) for i, w in enumerate(z)]
        noisy, known = zip(*found, strict=True)
        off = torch.stack([bounds["states_within"] for bounds in known])
        return torch.stack(noisy), {"states_within": off[:, None]}
    generator = torch.Generator().manual_seed(case.seed)
    lost = torch.randperm(z.shape[-1], generator=generator)[: int(case.level)]
    off = torch.full_like(z[:, :1], SLACK).index_fill(-1, lost, math.inf)
    return z.index_fill(-1, lost, 0.0), {"entries_within": off}


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Damage the states, and recover and prove the text."""
    network, tokens = trained(case.model).network, windows(case.model, case.num_windows)
    clean = network.stack(network.embedding(tokens))
    z, known = damaged(clean, case)
    certificate = certify(network) if network.is_invertible else None
    preimage, *_ = preimage_of(z, network, network.weights(), certificate)
    nearest = network.embedding.nearest_tokens(preimage)
    evidence = prefix_margins(network, nearest, z, unknown=None, fit=True, **known)
    right = evidence.tokens == tokens
    moved = (z - clean).norm(dim=-1) + SLACK
    within = (moved < evidence.margin - evidence.distance).cumprod(-1)
    is_coupling = isinstance(network.stack, CouplingStack)
    name = "coupling" if is_coupling else "certified" if network.is_invertible else "twin"
    return Result(
        name=name,
        at_once=None if name == "twin" else share(nearest == tokens),
        search=share(right),
        proven=share(evidence.proven),
        wrong=share(evidence.proven & ~right),
        beyond_radius=1 - share(within),
        margin=(evidence.margin.median() / clean.norm(dim=-1).square().mean().sqrt()).item(),
    )


def share(which: Tensor) -> float:
    """Share of characters."""
    return which.double().mean().item()


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Whether something proven is wrong."""
    wrong = {name: sum(values(group, "wrong")) for name, group in by(rows, "name").items()}
    words = "share of characters proven and wrong"
    findings = [(found == 0, f"{name}: {words} {found:g}") for name, found in wrong.items()]
    return Summary(table(rows), findings)


SHARES = {
    "at_once": "recovered, all positions at once",
    "search": "recovered, every symbol tried",
    "proven": "proven: no other text rounds to these states",
}


def draw(rows: Rows[Case, Result]) -> Figure:
    """Recovered and proven against bits, a column per model."""
    scales = {"bits": "one scale a window", "channel bits": "a scale a channel"}
    models = by(rows, "name")
    figure, axes = panels(len(scales), len(models))
    grid = [(kind, *model) for kind in scales for model in models.items()]
    for one, (kind, name, group) in zip(axes, grid, strict=True):
        some = [row for row in group if row[0].damage == kind]
        for index, (field, words) in enumerate(SHARES.items()):
            curves(one, some, "level", field, label=words, **look_of(index))
        one.set(
            title=f"{name}, {scales[kind]}", xlabel="bits of a rounded entry",
            ylabel="share of characters", ylim=(-0.03, 1.03),
        )  # fmt: skip
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
