"""Text back from damaged states: what comes back, and what is proven.

The top states of validation windows are rounded, made noisy, or lose channels. The text is sought
by the inverse of all positions at once, by trying every symbol at every position, and by trying the
few candidates that the inverse and the Jacobian of one position choose.

Proven is what :func:`.prefix_margins` proves of the text found by trying every symbol, if it is
known how far a state or its entries may be off: no other text has such states. Damage is beyond the
radius if a true state is not within m − δ of the one given (docs/numerics.md, 19), which needs no
such knowledge.

Verdict: no character with a proof is wrong, and where every symbol recovers at least 99 % of the
characters, the few candidates recover as many, within 1 %.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from invformer.config.section import option
from invformer.proofs.prefix_margins import prefix_margins
from invformer.trained.states import perturb
from studies.report import Figure, Rows, Summary, by, curves, look_of, panels, table, values
from studies.states import SLACK, decode, kind_of, trained, undoing, windows
from studies.study import Study, StudyOptions, case_of, program

ALL = 0.99  # of the characters


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Damage the states of trained models and bring the text back."""

    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    bits: list[int] = option([16, 8, 6, 5, 4, 3, 2, 1], "of rounding", "[1, 32]")
    noise: list[float] = option(
        [0.1, 0.3, 1.0], "of the states' root mean square length", "[0, 1e3]"
    )
    dropped: list[int] = option([1, 4, 32], "channels that are set to zero", "[1, 1e5]")
    num_windows: int = option(4, "windows of the validation split", "[1, 1e5]")
    num_candidates: int = option(8, "symbols tried at a position", "[1, 1e6]")


@dataclass(frozen=True)
class Case:
    """One model under one damage."""

    model: str
    damage: str
    level: float
    num_windows: int
    num_candidates: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Shares of characters; None: no inverse."""

    name: str
    at_once: float | None
    few: float | None
    search: float
    proven: float
    wrong: float  # proven, though they are not those of the text
    beyond_radius: float  # how often the damage exceeds the radius of the prefix margins
    margin: float  # median of m_i, of the states' root mean square length
    passes: float | None  # forward passes a character, by few candidates


def cases(options: Options) -> list[Case]:
    """Every damage of every model."""
    damages = [(kind, float(b)) for kind in ("bits", "channel bits") for b in options.bits]
    damages += [("noise", n) for n in options.noise]
    damages += [("dropped", float(d)) for d in options.dropped]
    return [
        case_of(Case, options, model=model, damage=damage, level=level)
        for model in options.models
        for damage, level in damages
    ]


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
    """Damage the states, decode them in three ways, and prove the best."""
    network, tokens = trained(case.model).network, windows(case.model, case.num_windows)
    name = kind_of(network)
    clean = network.stack(network.embedding(tokens))
    z, known = damaged(clean, case)
    off = known.get("entries_within")
    search = decode(network, z, None, off)
    at_once = few = passes = None
    if name != "twin":
        x = undoing(network, throw=True)(z)
        at_once = share(network.embedding.nearest_tokens(x) == tokens)
        found = [
            decode(network, z[i : i + 1], case.num_candidates, None if off is None else off[[i]])
            for i in range(len(z))
        ]
        few = share(torch.cat([one.tokens for one in found]) == tokens)
        passes = sum(one.passes for one in found) / tokens.numel()
    evidence = prefix_margins(network, search.tokens, z, unknown=None, **known)
    right = search.tokens == tokens
    moved = (z - clean).norm(dim=-1) + SLACK
    within = (moved < evidence.margin - evidence.distance).cumprod(-1)
    return Result(
        name=name,
        at_once=at_once,
        few=few,
        search=share(right),
        proven=share(evidence.proven),
        wrong=share(evidence.proven & ~right),
        beyond_radius=1 - share(within),
        margin=(evidence.margin.median() / clean.norm(dim=-1).square().mean().sqrt()).item(),
        passes=passes,
    )


def share(which: Tensor) -> float:
    """Share of characters."""
    return which.double().mean().item()


def summarise(rows: Rows[Case, Result]) -> Summary:
    """For every model what is wrong, and what few candidates lose."""
    findings = []
    for name, group in by(rows, "name").items():
        wrong = sum(values(group, "wrong"))
        findings.append((wrong == 0, f"{name}: share of characters proven and wrong {wrong:g}"))
        if few := [r for _, r in group if r.few is not None and r.search >= ALL]:
            lost = max(r.search - (r.few or 0.0) for r in few)
            passes = fmean(r.passes or math.nan for r in few)
            words = f"few candidates lose {lost:.2%} at most, {passes:.1f} passes a character"
            findings.append((lost <= 0.01, f"{name}: {words}"))
    return Summary(table(rows), findings)


SHARES = {
    "at_once": "recovered, all positions at once",
    "few": "recovered, few candidates a position",
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
