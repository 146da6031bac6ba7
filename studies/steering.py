"""Which changes of a state are texts: the preimage of steered states, and how far it is from one.

Steering adds t·v to the top state of every position. The stack is a bijection, so every steered
state has one preimage. Its distance from a text is, per position, that to the nearest symbol's
embedding, padded channels included, over half the least distance of two symbols: at 1 a symbol's
cell ends. Strength t is in units of the states' root mean square length.

v is the difference of the mean states of texts with and without a number ("N" on the Penn
Treebank), a random direction, or F(x′) − F(x) for a text x′ with one symbol changed, whose own
strength is 1.

Verdict: only the change of text meets a text again; the others leave the texts at every strength,
farther the stronger they are.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from invformer.config.section import option
from invformer.errors import ConfigurationError
from invformer.nn.transformer import CharTransformer
from studies.report import Figure, Finding, Rows, Summary, by, curves, panels, table
from studies.states import kind_of, trained, undoing, windows
from studies.study import Study, StudyOptions, grid, program

Vector = Literal["mean difference", "random", "text"]
MET = 1e-3  # half distances of two symbols: nearer than this is a text


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Steer the states of trained models, and look at the preimages."""

    models: list[str] = option([], "run folders of certified models or couplings")
    strengths: list[float] = option([0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0], "t")
    mark: str = option("N", "a character that texts have or lack", pattern=re.compile("."))
    num_windows: int = option(16, "windows that are steered", "[1, 1e4]")
    num_averaged: int = option(512, "windows behind the mean difference", "[2, 1e5]")


@dataclass(frozen=True)
class Case:
    """One model, one vector, one strength."""

    model: str
    vector: Vector
    strength: float
    mark: str
    num_windows: int
    num_averaged: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Distances of preimages from the nearest text, in half distances of two symbols."""

    name: str
    median: float  # over positions that were moved
    least: float  # of a window's farthest position
    largest: float
    changed: float  # share of moved positions whose nearest symbol is another


def cases(options: Options) -> list[Case]:
    """Every vector at every strength."""
    steered = {"vector": get_args(Vector), "strength": options.strengths}
    return grid(Case, options, model=options.models, **steered)


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Steer, invert, and find the nearest text."""
    network, tokens = trained(case.model).network, windows(case.model, case.num_windows)
    z = network.stack(network.embedding(tokens))
    v, moved = vector_of(case, network, tokens, z)
    steered = z + case.strength * v
    x = undoing(network, throw=True)(steered)
    nearest = network.embedding.nearest_tokens(x)
    unit = network.embedding.decoding_margin()
    away = (x - network.embedding(nearest)).norm(dim=-1) / unit
    farthest = away.masked_fill(~moved, 0.0).amax(-1)
    return Result(
        name=kind_of(network),
        median=away[moved].median().item(),
        least=farthest.min().item(),
        largest=farthest.max().item(),
        changed=(nearest != tokens)[moved].double().mean().item(),
    )


def vector_of(
    case: Case, network: CharTransformer, tokens: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """v, and which positions it moves; as long as a state, or F(x′) − F(x) as it is."""
    generator = torch.Generator().manual_seed(case.seed)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    length = z.norm(dim=-1).square().mean().sqrt()
    if case.vector == "text":
        vocab_size, place = network.head.out_features, tokens.shape[1] // 4
        other = tokens.clone()
        shift = torch.randint(1, vocab_size, (len(tokens),), generator=generator)
        other[:, place] = (tokens[:, place] + shift) % vocab_size
        return network.stack(network.embedding(other)) - z, everywhere.cumsum(-1) > place
    if case.vector == "random":
        v = torch.randn(z.shape[-1], generator=generator).to(z)
    else:
        v = mean_difference(case, network)
    return length * v / v.norm(), everywhere


def mean_difference(case: Case, network: CharTransformer) -> Tensor:
    """Mean state of texts with the mark less that of texts without.

    Raises:
        ConfigurationError: all texts have it, or none.
    """
    tokens = windows(case.model, case.num_averaged)
    mark = trained(case.model).vocabulary.encode(case.mark).long()
    means = network.stack(network.embedding(tokens)).mean(1)
    marked = (tokens == mark).any(-1)
    if not marked.any() or marked.all():
        raise ConfigurationError(f"mark: all texts or none have {case.mark!r}; try another")
    return means[marked].mean(0) - means[~marked].mean(0)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Which vectors meet a text, at which strengths."""
    findings: list[Finding] = []
    for (name, vector), group in by(rows, "name", "vector").items():
        met = [c.strength for c, r in group if r.largest < MET]
        left = [c.strength for c, r in group if c.strength and r.least < MET]
        where = f"{name}, {vector}: "
        if vector == "text":
            wanted = sorted({c.strength for c, _ in group} & {0.0, 1.0})
            findings.append((sorted(met) == wanted, f"{where}texts at strengths {met}"))
            continue
        by_strength = [r.median for _, r in sorted(group, key=lambda row: row[0].strength)]
        findings.append((not left, f"{where}a text at strengths {left} above 0"))
        findings.append((by_strength == sorted(by_strength), f"{where}the farther the stronger"))
    return Summary(table(rows), findings)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Distance from texts and changed symbols against strength, a column per model."""
    models = by(rows, "name")
    figure, axes = panels(2, len(models))
    for top, bottom, (name, group) in zip(axes, axes[len(models) :], models.items(), strict=False):
        curves(top, group, "strength", "least", ("vector",))
        curves(bottom, group, "strength", "changed", ("vector",))
        top.axhline(1, color="0.6")
        top.set(title=name, xlabel="strength", ylabel="distance from a text (1: a cell's edge)")
        top.set_yscale("symlog", linthresh=0.01)
        top.set_ylim(bottom=0)
        bottom.set(xlabel="strength", ylabel="share of symbols changed")
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
