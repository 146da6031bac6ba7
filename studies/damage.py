"""Text back from damaged states: what comes back, and what is proven.

The top states of validation windows are rounded, made noisy, or lose channels. The text is sought
by the inverse of all positions at once, by trying every symbol at every position, and by trying the
few candidates that the inverse and the Jacobian of one position choose.

Proven is what prefix margins prove of the text found by trying every symbol (docs/numerics.md, 19):
every other text has states farther from those given. The damage is within the radius if the true
states are nearer to those given than half their margins, up to that position. For rounding there is
a second proof: no other text has states that round to those given.

Margins in plain float64, beside it, prove nothing.

Verdict: no character with a proof is wrong, and where every symbol recovers at least 99 % of the
characters, the few candidates recover as many, within 1 %.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor

from invformer.config.section import option
from invformer.evaluation.prefix_margins import MarginEvidence, prefix_margins
from invformer.evaluation.recovered_text import perturb
from studies.report import Figure, Rows, Summary, by, curves, look_of, panels, table, values
from studies.states import decode, kind_of, margins, trained, undoing, windows
from studies.study import Study, StudyOptions, case_of, program

ALL = 0.99  # of the characters


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Damage the states of trained models and bring the text back."""

    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    bits: list[int] = option([16, 10, 8, 6, 5, 4, 3], "of rounding", "[1, 32]")
    noise: list[float] = option([0.03, 0.1, 0.3], "of the states' root mean square", "[0, 1e3]")
    dropped: list[int] = option([1, 4], "channels that are set to zero", "[1, 1e5]")
    num_windows: int = option(8, "windows of the validation split", "[1, 1e5]")
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
    """Shares of characters; None: no inverse, or no cells."""

    name: str
    at_once: float | None
    few: float | None
    search: float
    by_margins: float
    proven: float
    unique: float | None
    wrong: float
    beyond_radius: float  # how often the damage exceeds the proven radius
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


@lru_cache(maxsize=1)
def evidence_of_truth(folder: str, count: int) -> tuple[Tensor, Tensor, MarginEvidence]:
    """States of the windows; the margins of their texts in plain float64, and as proven."""
    network, tokens = trained(folder).network, windows(folder, count)
    with torch.no_grad():
        z = network.stack(network.embedding(tokens))
    return z, margins(network, tokens), prefix_margins(network, tokens, z)


def damaged(z: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
    """The states of every window after the damage, and half the step of a rounding."""
    if case.damage in ("bits", "channel bits"):
        over = (1, 2) if case.damage == "bits" else (0, 1)  # a scale a window, or a channel
        least, largest = z.amin(over, keepdim=True), z.amax(over, keepdim=True)
        step = (largest - least) / (2 ** int(case.level) - 1)
        return least + ((z - least) / step).round() * step, (step / 2).expand(len(z), -1, -1)
    if case.damage == "noise":
        noisy = [perturb(w, case.level, None, case.seed + i) for i, w in enumerate(z)]
        return torch.stack(noisy), None
    generator = torch.Generator().manual_seed(case.seed)
    lost = torch.randperm(z.shape[-1], generator=generator)[: int(case.level)]
    return z.index_fill(-1, lost, 0.0), None


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Damage the states, decode them in three ways, and prove the best."""
    network, tokens = trained(case.model).network, windows(case.model, case.num_windows)
    name = kind_of(network)
    clean, margin, evidence = evidence_of_truth(case.model, case.num_windows)
    z, cell = damaged(clean, case)
    search = decode(network, z, None, cell)
    at_once = few = passes = None
    if name != "twin":
        x = undoing(network, throw=True)(z)
        at_once = share(network.embedding.nearest_tokens(x) == tokens)
        found = [
            decode(network, z[i : i + 1], case.num_candidates, None if cell is None else cell[[i]])
            for i in range(len(z))
        ]
        few = share(torch.cat([one.tokens for one in found]) == tokens)
        passes = sum(one.passes for one in found) / tokens.numel()
    moved = (z - clean).norm(dim=-1)
    off = (moved + evidence.distance) * (1 + 1e-12)  # ≥ ‖F(x) − z‖, by the triangle inequality
    within = (2 * off < evidence.margin).cumprod(-1).bool()
    proven, wrong = within.clone(), search.tokens != tokens
    enclosed = evidence.margin.isfinite().all()
    for i in wrong.any(-1).nonzero()[:, 0].tolist() if enclosed else []:
        proven[i] = prefix_margins(network, search.tokens[i : i + 1], z[i : i + 1]).proven[0]
    sure = (proven & within) | (search.unique & (cell is not None))
    return Result(
        name=name,
        at_once=at_once,
        few=few,
        search=share(~wrong),
        by_margins=share((2 * moved < margin).cumprod(-1).bool() & ~wrong),
        proven=share(proven),
        unique=None if cell is None else share(search.unique),
        wrong=share(sure & wrong),
        beyond_radius=1 - share(within),
        margin=(margin.median() / clean.norm(dim=-1).square().mean().sqrt()).item(),
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
    "by_margins": "half its margin away, float64",
    "proven": "proven by margins",
    "unique": "no other text rounds to these states",
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


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
