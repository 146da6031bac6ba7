"""What the estimate foretells: which of many trainings end badly, from their first steps.

A family is a model, its optimiser and a text; its runs differ in rate, warm-up, clipping and seed.
For every family and rate the study draws ``runs_per_rate`` of the 12 combinations of warm-up (a
tenth of the steps, or none), clipping (at norm 1, or none) and three seeds. Rates double from too
small to hopeless. All decay by a cosine. The defaults are small, so that a run takes some seconds
of one thread: 2 blocks of width 48 with 4 heads, 48 characters, 8 windows a batch, 300 steps.

nanoGPT is trained unchanged, from a file of yours (``nanogpt=model.py``), and measured by
:func:`.local_constants`: its blocks, and in them attention and feed-forward. Our branches are
measured by :class:`.LipschitzProbe` at the full context, in token_max. ``bare`` has no LayerNorm
in its blocks; ``l2`` is tied L2 attention without constraint.

**Sick** is a run whose final validation loss is more than 0.1 nats above the best of its family,
or not finite. Families begin at the rate of their best run; smaller rates are reported apart, and
so are certified models.

Every signal is read once, after 2, 5, 10 and 20 % of the steps, over the median of its family's
healthy runs then; spike and growth need no other runs. A reading that is not finite is the worst.
Of ours, ``estimate`` is the largest branch, or block of nanoGPT, and ``growth`` the largest ratio
of one to its own start. Free signals may point either way: an area below ½ counts as one minus it.
``spike`` is the rule of Lightning's SpikeDetection without its threshold: the largest excess of a
loss over the mean of the ten before. The sensitivity of softmax (arXiv 2602.18849) is no signal.

Thresholds are the smallest that accuse at most 5 % of the healthy runs of half of the families; the
other half says what they find. The alarm watches ``growth`` from the first step to the last.

Verdict: after 5 % of the steps the estimate's area under the ROC curve is at least 0.9, and one
minus it at most half of that of the best free signal, in 95 % of resamples of the families too.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from invformer.config.schema import CorpusName
from invformer.config.section import option
from invformer.training.alarm import growth
from invformer.training.optimizers import warmup_cosine
from invformer.weights.spectral import refresh_normalisers
from studies.report import Figure, Finding, Rows, Summary, by, look_of, panels
from studies.roc import Labels, between, threshold
from studies.study import Study, case_of, program, progress
from studies.subjects import NanoGPT, Ours, largest_weight, of_attention, spike, validation
from studies.training import GRAD_CLIP, ModelCase, ModelOptions, TextConfig

Family = Literal[
    "nanogpt/adamw", "dot_product/adamw", "dot_product/muon", "bare/adamw", "bare/muon",
    "l2/adamw", "l2/muon", "certified/muon",
]  # fmt: skip
SEEDS = 3
COMBINATIONS = 4 * SEEDS  # of warm-up, clipping and seed
AT = (0.02, 0.05, 0.1, 0.2)  # shares of the steps
FIRST = 0.05  # the time of the verdict
WATCHED = 10  # times that the alarm looks, evenly spaced
SICK = 0.1  # nats above the best of a family
FREE = (
    "loss", "gradient_norm", "update_ratio", "weight_norm", "largest_logit", "entropy", "spike",
)  # fmt: skip
OURS = ("estimate", "estimate_attention", "estimate_feed_forward", "growth")
LOW_IS_SICK, AS_THEY_ARE = ("entropy",), ("spike", "growth")
SPIKES = 2.0  # excess at which SpikeDetection ends a training, by default


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train families of models from small to hopeless rates, and read signals on the way."""

    families: list[Family] = option(list(get_args(Family)), "MODEL/OPTIMISER")
    nanogpt: str | None = option(None, "nanoGPT's model.py; null leaves its families out")
    texts: list[str] = option(["python_docs", "python_stdlib"], "corpora, or files and folders")
    max_characters: int | None = option(1_000_000, "read of each text; null is all", "[1e3, 1e9]")
    val_characters: int = option(16_384, "characters that are scored", "[2, 1e9]")
    adam_rates: list[float] = option([2.5e-3 * 2**k for k in range(7)], "of AdamW", "(0, 10]")
    muon_rates: list[float] = option([1e-2 * 2**k for k in range(7)], "of Muon", "(0, 10]")
    runs_per_rate: int = option(2, "of the 12 combinations, for each family and rate", "[1, 12]")
    num_layers: int = option(2, "blocks", "[1, 1e3]")
    seq_len: int = option(48, "context of the models, characters", "[2, 1e5]")
    batch_size: int = option(8, "windows per batch", "[1, 1e6]")
    num_steps: int = option(300, "optimiser steps", "[20, 1e9]")


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One training; ``lr`` is the peak rate of Muon where there is Muon, else of AdamW."""

    family: Family
    has_warm_up: bool
    is_clipped: bool
    nanogpt: str | None


@dataclass(frozen=True)
class Result:
    """How a training ended, and what could be read on the way, at the steps ``points``."""

    val_nats: float  # per character; infinite after a loss that is not finite
    points: list[int]  # optimiser steps made before each reading
    readings: dict[str, list[float]]  # of every free signal
    branches: dict[str, list[float]]  # estimates of blocks, or of their branches


def cases(options: Options) -> list[Case]:
    """First one run of every family and rate, then the second, and so on."""
    families = [f for f in options.families if options.nanogpt or not f.startswith("nanogpt")]
    rounds: list[list[Case]] = [[] for _ in range(options.runs_per_rate)]
    for text, family in product(map(text_of, options.texts), families):
        config = TextConfig(
            **text, max_characters=options.max_characters, val_characters=options.val_characters
        )
        fields = config.case_fields(options.seq_len)
        rates = options.adam_rates if family.endswith("adamw") else options.muon_rates
        for rate in rates:
            combinations = list(product((True, False), (True, False), range(SEEDS)))
            drawn = random.Random(f"{options.seed} {fields['sha256']} {family} {rate}")
            drawn.shuffle(combinations)
            for runs, (warm, clipped, seed) in zip(rounds, combinations, strict=False):
                runs.append(case_of(
                    Case, options, **fields, family=family, lr=rate, has_warm_up=warm,
                    is_clipped=clipped, seed=options.seed + seed,
                    nanogpt=options.nanogpt if family.startswith("nanogpt") else None,
                ))  # fmt: skip
    return [case for runs in rounds for case in runs]


def text_of(word: str) -> dict[str, Any]:
    """Name and path of a corpus, from its name or its path."""
    known = word in get_args(CorpusName) and word != "text_file"
    return {"name": word} if known else {"name": "text_file", "path": word}


def points_of(num_steps: int) -> list[int]:
    """Steps made before each reading: those of the signals, and those at which the alarm looks."""
    shares = [*AT, *(k / WATCHED for k in range(WATCHED))]
    return sorted({round(share * num_steps) for share in shares})


def measure(case: Case, device: torch.device) -> Result:
    """Train, read every signal at its steps, and score."""
    file = case.nanogpt
    subject = NanoGPT(case, file, device) if file else Ours(case, case.family, device)
    warm_up = case.num_steps // 10 if case.has_warm_up else 0
    schedule = warmup_cosine(subject.optimiser, warm_up, case.num_steps)
    limit = GRAD_CLIP if case.is_clipped else math.inf
    weights, points, losses = list(subject.model.parameters()), points_of(case.num_steps), []
    readings: dict[str, list[float]] = {name: [] for name in FREE}
    branches: dict[str, list[float]] = {}
    for step in progress(range(case.num_steps), "training"):
        loss = subject.nats(*(part.to(device) for part in case.batches.batch(step)))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        subject.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(weights, limit).item()
        before = None
        if step in points:
            before = nn.utils.parameters_to_vector(weights).detach()
            found = {"loss": losses[-1], "gradient_norm": norm, "spike": spike(losses)}
            found |= {"weight_norm": largest_weight(subject.blocks)}
            found |= zip(("largest_logit", "entropy"), of_attention(subject), strict=True)
            keep(readings, found)
            keep(branches, subject.constants())
        subject.optimiser.step()
        schedule.step()
        refresh_normalisers(subject.model)
        if before is not None:
            moved = (nn.utils.parameters_to_vector(weights).detach() - before).norm()
            keep(readings, {"update_ratio": (moved / before.norm()).item()})
    nats = validation(subject) if math.isfinite(losses[-1]) else math.inf
    nats = nats if math.isfinite(nats) else math.inf
    return Result(nats, points[: len(readings["loss"])], readings, branches)


def keep(series: dict[str, list[float]], found: dict[str, float]) -> None:
    """Add a reading to each series; NaN is kept as infinity."""
    for name, value in found.items():
        series.setdefault(name, []).append(math.inf if math.isnan(value) else value)


@dataclass(frozen=True)
class Run:
    """A run beside the others of its family."""

    case: Case
    result: Result
    family: str
    best: tuple[Case, Result]  # of the family

    @property
    def is_sick(self) -> bool:
        """Ended more than 0.1 nats above the best of its family."""
        return not self.result.val_nats <= self.best[1].val_nats + SICK

    @property
    def group(self) -> str:
        """Judged, or reported apart."""
        if self.case.family.startswith("certified"):
            return "certified"
        return "judged" if self.case.lr >= self.best[0].lr else "too small"

    def reading(self, signal: str, step: int) -> float:
        """A signal after some steps; infinite if the run had ended."""
        if step not in self.result.points:
            return math.inf
        index = self.result.points.index(step)
        if signal in FREE:
            return self.result.readings[signal][index]
        names = self.watched(signal.removeprefix("estimate_") if "_" in signal else None)
        now, start = ({name: self.result.branches[name][i] for name in names} for i in (index, 0))
        return growth(now, start)[0] if signal == "growth" else max(now.values())

    def watched(self, kind: str | None) -> list[str]:
        """All branches of a kind; None takes blocks if they were measured."""
        names = list(self.result.branches)
        if kind is not None:
            return [name for name in names if name.endswith(kind)]
        return [name for name in names if "/" not in name] or names

    @property
    def growth(self) -> list[float]:
        """The alarm's signal at every reading."""
        return [self.reading("growth", step) for step in self.result.points]


def runs_of(rows: Rows[Case, Result]) -> list[Run]:
    """Every run with the best of its family."""
    found = []
    for (family, text), group in by(rows, "family", "sha256").items():
        best = min(group, key=lambda row: row[1].val_nats)
        found += [Run(case, result, f"{family} {text}", best) for case, result in group]
    return found


def scores_of(runs: Sequence[Run], signal: str, share: float) -> Tensor:
    """A signal of all runs after a share of the steps, higher where it is worse.

    The logarithm of its ratio to the median of the family's healthy runs, or itself.
    """
    found = [run.reading(signal, round(share * run.case.num_steps)) for run in runs]
    scores = torch.tensor(found, dtype=torch.float64)
    if signal not in AS_THEY_ARE:
        healthy = by([row for row in zip(runs, found, strict=True) if not row[0].is_sick], "family")
        usual = {family: median(value for _, value in rows) for family, rows in healthy.items()}
        ratio = scores / torch.tensor([usual[run.family] for run in runs], dtype=torch.float64)
        scores = (-1 if signal in LOW_IS_SICK else 1) * ratio.log()
    return scores.masked_fill(~torch.tensor(found).isfinite() | scores.isnan(), math.inf)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The table of signals, and the verdict about the estimate."""
    runs = runs_of(rows)
    judged = [run for run in runs if run.group == "judged"]
    if not judged:
        return Summary([], [(None, "no family without a certificate: nothing is judged")])
    names = sorted({run.family for run in judged})
    labels = Labels(
        torch.tensor([run.is_sick for run in judged]),
        torch.tensor([names.index(run.family) for run in judged]),
    )
    table = [line_of(judged, labels, signal) for signal in (*FREE, *OURS)]
    share = len(runs) / len({(run.family, run.case.lr) for run in runs}) / COMBINATIONS
    counts = (
        f"{len(judged)} runs of {len(names)} families, {int(labels.sick.sum())} sick; "
        f"{len(runs)} runs in all, {share:.2f} of all combinations"
    )
    findings = [*verdict(judged, labels), *beside(runs, judged, labels)]
    return Summary(table, [(None, counts), *findings])


def line_of(judged: Sequence[Run], labels: Labels, signal: str) -> dict[str, Any]:
    """Areas at four times; at 5 % what a threshold of other families finds and accuses."""
    line: dict[str, Any] = {"signal": signal}
    for share in AT:
        line[f"area {100 * share:.0f} %"] = labels.area(scores_of(judged, signal, share))
    found, accused = labels.held_out(scores_of(judged, signal, FIRST))
    return line | {"found": between(found), "accused": between(accused)}


def verdict(judged: Sequence[Run], labels: Labels) -> list[Finding]:
    """Whether the estimate's area is large, and what is missing half of any free signal's."""
    ours = labels.area(scores_of(judged, "estimate", FIRST))
    resampled = labels.resampled_areas(scores_of(judged, "estimate", FIRST))
    areas, resamples = {}, []
    for signal in FREE:  # whichever way it points
        scores = scores_of(judged, signal, FIRST)
        areas[signal] = max(labels.area(scores), 1 - labels.area(scores))
        again = labels.resampled_areas(scores)
        resamples.append(torch.maximum(again, 1 - again))
    best = max(areas, key=lambda signal: areas[signal])
    half = (1 - resampled) <= (1 - torch.stack(resamples).amax(0)) / 2
    sure = half[~resampled.isnan()].double().mean().item()
    is_half = areas[best] < ours and 1 - ours <= (1 - areas[best]) / 2 and sure >= 0.95
    low, high = resampled.nanquantile(torch.tensor([0.025, 0.975]).double()).tolist()
    when = f"after {100 * FIRST:.0f} % of the steps"
    return [
        (ours >= 0.9, f"{when} the estimate's area is {ours:.3f} ({low:.3f} to {high:.3f})"),
        (
            is_half,
            f"{when} the best free signal, {best}, has {areas[best]:.3f}; one minus the estimate's "
            f"is at most half of one minus that in {100 * sure:.0f} % of resamples",
        ),
    ]


def limit_of(judged: Sequence[Run]) -> float:
    """The growth at which the alarm sounds, chosen on all families."""
    healthy = [max(run.growth) for run in judged if not run.is_sick]
    return threshold(torch.tensor(healthy, dtype=torch.float64))


def beside(runs: Sequence[Run], judged: Sequence[Run], labels: Labels) -> list[Finding]:
    """The alarm, SpikeDetection as Lightning has it, rates that are too small, certified models."""
    limit, peaks = limit_of(judged), [max(run.growth) for run in judged]
    found, accused = labels.held_out(torch.tensor(peaks, dtype=torch.float64))
    sick = [run for run in judged if run.is_sick]
    grown = [[value > limit for value in run.growth] for run in sick]
    when = [run.result.points[g.index(True)] for run, g in zip(sick, grown, strict=True) if any(g)]
    share = 100 * median(when) / judged[0].case.num_steps if when else math.nan
    early = f", half of them by {share:.0f} % of the steps" if when else ""
    spiked = [run.is_sick for run in judged if max(run.result.readings["spike"]) >= SPIKES]
    lines = [
        f"alarm: some branch grows more than {limit:.3g} times: finds {between(found)} of the "
        f"sick runs of other families{early}, accuses {between(accused)} of the healthy ones",
        f"SpikeDetection stops {sum(spiked)} of {len(sick)} sick runs "
        f"and {len(spiked) - sum(spiked)} of {len(judged) - len(sick)} healthy ones",
    ]
    loud = [run for run in runs if max(run.growth) > limit]
    bad = sum(run.is_sick for run in loud)
    lines.append(f"of all {len(runs)} runs it sounds in {len(loud)}, of which {bad} are sick")
    for group in ("too small", "certified"):
        part = [(run.is_sick, max(run.growth) > limit) for run in runs if run.group == group]
        if part:
            lines.append(
                f"{group}: {sum(sick for sick, _ in part)} of {len(part)} runs are sick; the alarm "
                f"sounds in {part.count((True, True))} of these, in {part.count((False, True))} "
                "of the others"
            )
    return [(None, line) for line in lines]


def draw(rows: Rows[Case, Result]) -> Figure:
    """Areas against time, growth of every run, and its peak against the final loss."""
    figure, (areas, grown, ends) = panels(1, 3)
    runs = runs_of(rows)
    judged = [run for run in runs if run.group == "judged"]
    for index, line in enumerate(summarise(rows).table):
        width = 2.5 if line["signal"] in OURS else 1.0
        values = [line[f"area {100 * share:.0f} %"] for share in AT]
        look: dict[str, Any] = look_of(index) | {"linewidth": width}
        areas.plot([100 * share for share in AT], values, label=line["signal"], **look)
    areas.set(xlabel="share of the steps, %", ylabel="area under the ROC curve", xscale="log")
    areas.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    grown.axhline(limit_of(judged), color="0.5")
    ends.axvline(limit_of(judged), color="0.5")
    for run in judged:
        at = [100 * step / run.case.num_steps for step in run.result.points]
        look = {"color": "0"} if run.is_sick else {"color": "0.7", "linestyle": ":"}
        grown.plot(at, run.growth, **look, linewidth=0.6)
    grown.set(xlabel="share of the steps, %", ylabel="largest growth of a branch", yscale="log")
    grown.set(title="solid: sick, dotted grey: healthy")
    for index, group in enumerate(("judged", "too small", "certified")):
        part = [run for run in runs if run.group == group and math.isfinite(run.result.val_nats)]
        above = [max(run.result.val_nats - run.best[1].val_nats, 1e-3) for run in part]
        look = look_of(index) | {"linestyle": "none"}
        ends.plot([max(run.growth) for run in part], above, label=group, **look)
    ends.axhline(SICK, color="0.5")
    ends.set(xlabel="largest growth of a branch", ylabel="nats above the best of the family")
    ends.loglog()
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
