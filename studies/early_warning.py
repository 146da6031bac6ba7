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
Of ours, ``estimate`` is the largest branch. ``growth`` is the largest ratio of a branch to its own
start. The free signals may point either way: an area below ½ counts as one minus it. ``spike`` is
the rule of Lightning's SpikeDetection, without its threshold: the largest excess of a loss over the
mean of the ten before it. The sensitivity of softmax (arXiv 2602.18849) is not among the signals.

Thresholds are the smallest that accuse at most 5 % of the healthy runs of half of the families; the
other half says what they find. The alarm watches ``growth`` from the first step to the last.

Verdict: after 5 % of the steps the estimate's area under the ROC curve is at least 0.9, and one
minus it at most half of that of the best free signal, in 95 % of resamples of the families too.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any, Literal, get_args

import torch
from torch import nn

from invformer.config.schema import CorpusName
from invformer.config.section import option
from invformer.data.windows import TrainingWindows
from invformer.nn.spectral import refresh_normalisers
from invformer.training.optimizers import warmup_cosine
from studies.report import Figure, Finding, Rows, Summary, by, panels
from studies.study import Study, case_of, program, progress
from studies.subjects import NanoGPT, Ours, of_attention
from studies.training import GRAD_CLIP, ModelCase, ModelOptions, TextConfig

Family = Literal[
    "nanogpt/adamw", "dot_product/adamw", "dot_product/muon", "bare/adamw", "bare/muon",
    "l2/adamw", "l2/muon", "certified/muon",
]  # fmt: skip
SEEDS = 3
AT = (0.02, 0.05, 0.1, 0.2)  # shares of the steps
FIRST = 0.05  # the time of the verdict
WATCHED = 10  # times that the alarm looks, evenly spaced
SICK = 0.1  # nats above the best of a family
ALLOWED = 0.05  # share of healthy runs that a threshold may accuse where it is chosen
WINDOW = 10  # losses in SpikeDetection's running mean
FREE = (
    "loss", "gradient_norm", "update_ratio", "weight_norm", "largest_logit", "entropy", "spike",
)  # fmt: skip
OURS = ("estimate", "estimate_attention", "estimate_feed_forward", "growth")
LOW_IS_SICK = ("entropy",)
AS_THEY_ARE = ("spike", "growth")
RESAMPLES = 2000


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train families of models from small to hopeless rates, and read signals on the way."""

    families: list[Family] = option(list(get_args(Family)), "MODEL/OPTIMISER")
    nanogpt: str | None = option(None, "nanoGPT's model.py; null leaves its families out")
    texts: list[str] = option(["python_docs", "python_stdlib"], "corpora, or files and folders")
    max_characters: int | None = option(
        1_000_000, "read of each text; null reads all", "[1e3, 1e9]"
    )
    val_characters: int = option(16_384, "characters that are scored", "[2, 1e9]")
    adam_rates: list[float] = option([2.5e-3 * 2**k for k in range(7)], "of AdamW", "(0, 10]")
    muon_rates: list[float] = option([1e-2 * 2**k for k in range(7)], "of Muon", "(0, 10]")
    runs_per_rate: int = option(2, "of the 12 combinations, for each family and rate", "[1, 12]")
    d_model: int = option(48, "width of the models, channels", "[1, 1e5]")
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
    kind, _, optimiser = case.family.partition("/")
    subject = (
        NanoGPT(case, case.nanogpt, device) if case.nanogpt else Ours(case, kind, optimiser, device)
    )
    warm_up = case.num_steps // 10 if case.has_warm_up else 0
    schedule = warmup_cosine(subject.optimiser, warm_up, case.num_steps)
    limit = GRAD_CLIP if case.is_clipped else math.inf
    windows = TrainingWindows(case.text.train, case.seq_len, case.batch_size, case.seed)
    weights, points, losses = list(subject.model.parameters()), points_of(case.num_steps), []
    readings: dict[str, list[float]] = {name: [] for name in FREE}
    branches: dict[str, list[float]] = {}
    for step in progress(range(case.num_steps), "training"):
        inputs, targets = (part.to(device) for part in windows.batch(step))
        if step == 0:
            subject.begin(inputs)
        loss = subject.nats(inputs, targets)
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
    made = points[: len(readings["loss"])]
    return Result(nats if math.isfinite(nats) else math.inf, made, readings, branches)


def keep(series: dict[str, list[float]], found: dict[str, float]) -> None:
    """Add a reading to each series; NaN is kept as infinity."""
    for name, value in found.items():
        series.setdefault(name, []).append(math.inf if math.isnan(value) else value)


def spike(losses: Sequence[float]) -> float:
    """The largest rise of a loss above the mean of the ten before it, as a share of that."""
    rises = [0.0]
    for i, (before, loss) in enumerate(pairwise(losses), 1):
        mean = fmean(losses[max(0, i - WINDOW) : i])
        rises.append((loss - mean) / mean if loss > before else 0.0)
    return max(rises)


def largest_weight(blocks: nn.Module) -> float:
    """The largest spectral norm of a matrix in the blocks, each head's its own."""
    named = blocks.named_parameters()
    found = [w.detach() for name, w in named if w.dim() > 1 and "position" not in name]
    if not all(w.isfinite().all() for w in found):
        return math.inf
    return max(torch.linalg.matrix_norm(w, 2).max().item() for w in found)


@torch.no_grad()
def validation(subject: Ours | NanoGPT) -> float:
    """Nats per character of the validation text's whole windows."""
    inputs, targets = subject.text
    parts = zip(inputs.split(64), targets.split(64), strict=True)
    return sum(subject.nats(*part).item() * len(part[0]) for part in parts) / len(inputs)


def summarise(rows):
    return Summary([{"a": 1}])


def draw(rows):
    return panels(1, 1)[0]


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
