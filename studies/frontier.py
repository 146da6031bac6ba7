"""The price of a certificate: bits per character against the Lipschitz constants of the branches.

Every model is trained under every certificate, target c, optimiser, depth, learning rate and seed,
on the same batches, with the schedule and the clipping of ``train.py``. Then, on the trained model:

    bpc         bits per character of the whole validation split, each character once
    certified   the largest proven bound of any residual branch, or of its diagonal blocks under a
                causal certificate, in the norm of the certificate
    estimate    the largest ‖∂f/∂X‖ of any branch f at validation windows, in token_max, from below
    inversion   characters recovered from the top of the stack, and what that costs

Baselines have neither certificate nor c and are trained once. The best learning rate of a
configuration, and the best configuration, are chosen on the split they are scored on, baselines and
certified alike. The paper: Kim et al. 2021, whose contractive models are far behind at equal depth.

The default is 12 small trainings; docs/results.md has the command of a grid of 114.
``scale=paper``: nanoGPT's CPU recipe on Tiny Shakespeare, 2232 trainings; resume it at will.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.assemble.model import build_model
from invformer.config.schema import MANY, AttentionName, CertificateName, ModelConfig
from invformer.config.section import option, section
from invformer.data.windows import EvaluationWindows
from invformer.evaluation.inversion import round_trip
from invformer.evaluation.likelihood import score
from invformer.evaluation.lipschitz import require_sandwich
from invformer.evaluation.ngram import witten_bell_nats
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.certificate import certify, enforce
from invformer.nn.transformer import CharTransformer
from studies.depth_stability import PAPER_DEPTHS, PAPER_NATS
from studies.report import Figure, Rows, Summary, grouped, panels
from studies.study import Study, StudyOptions, case_of, main
from studies.training import (
    RecipeCase,
    Text,
    Training,
    WholeTextConfig,
    text_fields,
    text_of,
    train_by_recipe,
)

Optimiser = Literal["adamw", "muon"]

LN2 = math.log(2)
NGRAM_ORDER = 5
MARKERS = "osD^vP*X"


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Train certified and unconstrained models and hold their loss against their constants."""

    program: ClassVar[str] = "-m studies.frontier"
    paper: ClassVar[str] = (
        "certificates=[token_max,causal] strictly_causal=[false,true] "
        "diagonal_scaling=[false,true] "
        "lipschitz_targets=[0.3,0.5,0.7,0.9,0.97] optimisers=[adamw,muon] depths=[2,4,8] "
        "num_seeds=3 lr=[4e-3,8e-3] d_model=128 seq_len=64 batch_size=12 num_steps=2000 "
        "data.name=tiny_shakespeare data.max_characters=null data.val_fraction=0.1 "
        "data.test_fraction=0.0"
    )
    models: list[AttentionName] = option(
        ["dot_product", "l2", "contractive_l2", "contractive_bounded"], "attention maps"
    )
    certificates: list[CertificateName] = option(
        ["token_max"], "of the contractive models; kim_* are for tied L2 attention only"
    )
    strictly_causal: list[bool] = option(
        [False], "whether tokens of contractive_bounded see only those before them"
    )
    diagonal_scaling: list[bool] = option(
        [True], "whether branches of contractive models contract in metrics of their own"
    )
    lipschitz_targets: list[float] = option(
        [0.5, 0.97], "c of the contractive models", within="(0, 1)"
    )
    optimisers: list[Optimiser] = option(["adamw", "muon"], "optimisers")
    depths: list[int] = option([2], "numbers of blocks", within="[1, 1e3]")
    num_seeds: int = option(1, "seeds, from seed on", within="[1, 1e4]")
    lr: list[float] = option(
        [8e-3], "peak learning rates of AdamW, the best counts", within="(0, 10]"
    )
    muon_lr: list[float] = option([2e-2], "the same of Muon, with each lr", within="(0, 10]")
    weight_decay: float = option(0.0, "decoupled weight decay", within="[0, 100]")
    d_model: int = option(48, "width, channels", within="[1, 1e5]")
    num_heads: int = option(4, "attention heads, a divisor of d_model", within="[1, 1e4]")
    seq_len: int = option(64, "context, characters", within="[2, 1e5]")
    batch_size: int = option(12, "windows per batch", within="[1, 1e6]")
    num_steps: int = option(400, "optimiser steps", within=MANY)
    num_windows: int = option(
        4, "validation windows for estimates and inversion", within="[1, 1e4]"
    )
    probe_steps: int = option(100, "power iteration steps per estimate", within=MANY)
    data: WholeTextConfig = section(WholeTextConfig)

    def check(self) -> None:
        """Heads divide the width."""
        self.require_divided_by_heads("d_model")


@dataclass(frozen=True, kw_only=True)
class Case(RecipeCase):
    """One model, everything about its training, and how it is measured.

    ``certificate`` and ``lipschitz_target`` are None for baselines.
    """

    model: AttentionName
    certificate: CertificateName | None
    strictly_causal: bool
    diagonal_scaling: bool
    lipschitz_target: float | None
    optimiser: Optimiser
    weight_decay: float
    num_windows: int
    probe_steps: int

    @property
    def is_certified(self) -> bool:
        """Whether the model is contractive."""
        return self.certificate is not None


@dataclass(frozen=True)
class Result:
    """What one trained model is worth; NaN where the training lost its numbers."""

    nats: float  # per character of the whole validation split
    bpc: float
    train_nats: float  # mean over the last steps
    ngram_nats: float  # of a Witten–Bell 5-gram of the same text on the same characters
    num_characters: int
    num_parameters: int
    steps_taken: int  # fewer than asked for after a non-finite loss
    norm: str  # in which the certificate is stated; empty for baselines
    kind: str  # global, or causal where the bounds are those of the diagonal Jacobian blocks
    certified: float | None  # largest bound of a branch or of its diagonal blocks, in ``norm``
    certified_token_max: float | None  # largest bound of a branch in token_max, above ``estimate``
    certified_total: float | None  # of the whole stack in ``norm``; None unless global
    estimate: float  # largest local constant of a branch at the windows, token_max, from below
    residual: float  # how far the worst estimate is from stationary, relative to its value
    recovered: float | None  # share of the windows' characters that come back
    evaluations: list[int]  # of every branch, bottom first, by the inversion of the worst window

    @property
    def failed(self) -> bool:
        """Whether the training lost its numbers."""
        return not math.isfinite(self.nats)


def cases(options: Options) -> list[Case]:
    """The whole grid, one seed after the other; what would be the same training stands once."""
    text = text_fields(options.data, options.seq_len)
    seeds = range(options.seed, options.seed + options.num_seeds)
    found = [
        case_of(
            Case, options, model=model, certificate=certificate, strictly_causal=strictly,
            diagonal_scaling=metric, lipschitz_target=target, optimiser=optimiser, num_layers=depth,
            seed=seed, lr=lr, muon_lr=muon_lr, **text,
        )
        for seed, depth, model in itertools.product(seeds, options.depths, options.models)
        for certificate, strictly, metric, target in constraints(model, options)
        for optimiser, lr, muon_lr in rates(options)
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def constraints(
    model: AttentionName, options: Options
) -> Iterator[tuple[CertificateName | None, bool, bool, float | None]]:
    """Certificate, strictly causal or not, in metrics or not, and c: what applies to a model."""
    if not model.startswith("contractive"):
        yield None, False, False, None
        return
    is_bounded = model == "contractive_bounded"
    strictly_causal = options.strictly_causal if is_bounded else [False]
    for certificate, strictly, metric, target in itertools.product(
        options.certificates, strictly_causal, options.diagonal_scaling, options.lipschitz_targets
    ):
        # Kim's theorems are about tied attention: what is in the unit ball is held in token_max.
        is_tied_only = is_bounded and certificate.startswith("kim_")
        yield "token_max" if is_tied_only else certificate, strictly, metric, target


def rates(options: Options) -> Iterator[tuple[Optimiser, float, float | None]]:
    """Every optimiser with its learning rates: AdamW has one, Muon two."""
    for optimiser in options.optimisers:
        muon = options.muon_lr if optimiser == "muon" else [None]
        for lr, muon_lr in itertools.product(options.lr, muon):
            yield optimiser, lr, muon_lr


def measure(case: Case, device: torch.device) -> Result:
    """Train one model, then score, certify, probe and invert it."""
    text = text_of(case)
    model, trained = train(case, device)
    model.eval()
    lost = Result(
        nats=math.nan, bpc=math.nan, train_nats=trained.final_nats,
        ngram_nats=ngram_nats(text), num_characters=len(text.val),
        num_parameters=sum(p.numel() for p in model.parameters()),
        steps_taken=len(trained.losses), norm="", kind="", certified=None, certified_token_max=None,
        certified_total=None, estimate=math.nan, residual=math.nan, recovered=None, evaluations=[],
    )  # fmt: skip
    if not (trained.finite and all(p.isfinite().all() for p in model.parameters())):
        return lost
    certificate = enforce(model) if case.is_certified else None
    windows = EvaluationWindows(text.val, case.seq_len, case.seq_len, case.batch_size)
    likelihood = score(model, windows, device)
    probe = spread_windows(text.val, case.seq_len, case.num_windows).to(device)
    estimate, residual, bound = local_constant(model, probe, case.probe_steps)
    result = replace(
        lost, nats=likelihood.nats, bpc=likelihood.bpc, estimate=estimate, residual=residual
    )
    if certificate is None:
        return result
    found = round_trip(model, probe, certificate, dtype=torch.float64).numbers()
    return replace(
        result, norm=certificate.norm, kind=certificate.kind, certified=certificate.bound_max,
        certified_token_max=bound, certified_total=certificate.total,
        recovered=found["characters_recovered"],
        evaluations=[found["num_evaluations"][name] for name in certificate.per_branch],
    )  # fmt: skip


def train(case: Case, device: torch.device) -> tuple[CharTransformer, Training]:
    """A fresh model of the case, trained as ``train.py`` would with these options."""
    text = text_of(case)
    torch.manual_seed(case.seed)
    config = ModelConfig(
        name=case.model, certificate=case.certificate, strictly_causal=case.strictly_causal,
        diagonal_scaling=case.diagonal_scaling, activation_norm=not case.diagonal_scaling,
        d_model=case.d_model, num_heads=case.num_heads, num_layers=case.num_layers,
        lipschitz_target=case.lipschitz_target or ModelConfig.lipschitz_target,
    )  # fmt: skip
    model = build_model(config, text.vocab_size, case.seq_len).float().to(device)
    what = f"{case.model}, {case.num_layers} layers"
    return model, train_by_recipe(model, case, case.weight_decay, what=what)


@lru_cache(maxsize=2)
def ngram_nats(text: Text) -> float:
    """Nats per character under a Witten–Bell n-gram."""
    return witten_bell_nats(text.train, text.val, NGRAM_ORDER, vocab_size=text.vocab_size)


def spread_windows(
    tokens: Integer[Tensor, "characters"], seq_len: int, count: int
) -> Integer[Tensor, "count seq_len"]:
    """Windows at equal distances over a whole text: its beginning may be its easiest part."""
    starts = torch.linspace(0, len(tokens) - seq_len, count, dtype=torch.float64).long()
    return tokens[starts[:, None] + torch.arange(seq_len)].long()


def local_constant(
    model: CharTransformer, windows: Integer[Tensor, "count seq_len"], num_steps: int
) -> tuple[float, float, float | None]:
    """The largest local constant of any branch in token_max, its residual, and the largest bound.

    The bound is None for baselines.

    Raises:
        CertificateViolation: a branch's estimate exceeds its own bound.
    """
    estimates = LipschitzProbe(model, windows, "token_max").estimate(num_steps)
    bounds: dict[str, float] = {}
    if model.is_invertible:
        dtype = model.embedding.position.dtype
        bounds = certify(model, "token_max", dtype, "global").per_branch
    for name, (value, _) in estimates.items():
        pair = {"estimate": value.max().item(), "bound": bounds.get(name)}
        require_sandwich(f"token_max/{name}", pair)
    values, residuals = (torch.stack(each) for each in zip(*estimates.values(), strict=True))
    largest = values.argmax()
    bound = max(bounds.values()) if bounds else None
    return values.flatten()[largest].item(), residuals.flatten()[largest].item(), bound


# --- the seeds of every configuration together ---------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One configuration (a case with its first seed) at its best learning rate, over its seeds."""

    case: Case
    results: list[Result]  # of seeds whose training did not fail, or of all if every one did
    num_seeds: int

    @property
    def num_failed(self) -> int:
        """Seeds whose training lost its numbers."""
        return self.num_seeds - sum(not result.failed for result in self.results)

    def values(self, name: str) -> list[float]:
        """A field of every seed's result."""
        return [getattr(result, name) for result in self.results]

    def mean(self, name: str) -> float:
        """Mean of a field over the seeds."""
        return math.fsum(self.values(name)) / len(self.results)

    @property
    def label(self) -> str:
        """Model and certificate, whether tokens see only those before them, and metrics."""
        strictly = "strictly" if self.case.strictly_causal else None
        metric = "metric" if self.case.diagonal_scaling else None
        return " ".join(filter(None, (self.case.model, self.case.certificate, strictly, metric)))

    def __str__(self) -> str:
        c, depth = self.case.lipschitz_target, self.case.num_layers
        target = "" if c is None else f" c={c:g}"
        return f"{self.label}{target}, {self.case.optimiser}, {depth} layers"


def points_of(rows: Rows[Case, Result]) -> list[Point]:
    """Every configuration at the learning rate with the fewest failures, then the fewest nats."""
    first = rows[0][0].seed
    trials: list[Point] = []
    for case, group in grouped(rows, lambda row: replace(row[0], seed=first)).items():
        results = [result for _, result in group]
        finite = [result for result in results if not result.failed]
        trials.append(Point(case, finite or results, len(results)))
    choices = grouped(trials, lambda point: replace(point.case, lr=0.0, muon_lr=None))
    return [min(points, key=preference) for points in choices.values()]


def preference(point: Point) -> tuple[int, float]:
    """Fewest failed seeds first, then the smallest loss; a NaN comes last."""
    nats = point.mean("nats")
    return point.num_failed, math.inf if math.isnan(nats) else nats


def best_of(points: Sequence[Point], certified: bool, depth: int | None = None) -> Point | None:
    """The best certified or the best unconstrained configuration; None if none has a loss."""
    kept = [
        p
        for p in points
        if p.case.is_certified == certified
        and depth in (None, p.case.num_layers)
        and math.isfinite(p.mean("nats"))
    ]
    return min(kept, key=preference, default=None)


def gap(certified: Point, free: Point) -> float:
    """What the certificate costs, nats per character: positive if the certified model is worse."""
    return certified.mean("nats") - free.mean("nats")


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every configuration, and the best certified beside the best unconstrained one."""
    points = points_of(rows)
    depths = list(dict.fromkeys(p.case.num_layers for p in points))
    free = {depth: best_of(points, False, depth) for depth in depths}
    certified = {depth: best_of(points, True, depth) for depth in depths}
    table = [table_line(point, free[point.case.num_layers]) for point in points]
    case, result = rows[0]
    gaps = [
        f"{gap(proven, other):+.3f} at {depth}"
        for depth in depths
        if (proven := certified[depth]) and (other := free[depth])
    ]
    ours = (
        f"{headline(best_of(points, True), best_of(points, False))}; gap in nats by layers: "
        f"{', '.join(gaps) or 'not run'}; {NGRAM_ORDER}-gram {result.ngram_nats:.3f} nats; "
        f"{case.corpus}, all {result.num_characters} validation characters once, context "
        f"{case.seq_len}, {case.num_steps} steps"
    )
    failed = sum(point.num_failed for point in points)
    why = (
        "no frontier is published; learning rates and best rows are chosen on the split they are "
        f"scored on, {points[0].num_seeds} seed{'s' if points[0].num_seeds > 1 else ''} each; "
        f"{failed} of the best learning rates' trainings failed"
    )
    return Summary(table, paper_in_words(), ours, "not in the paper", why)


def table_line(point: Point, free: Point | None) -> dict[str, Any]:
    """One configuration, mean over its seeds, beside the best unconstrained one of its depth."""
    case, certified = point.case, point.case.is_certified and not point.results[0].failed
    nats = point.values("nats")
    return {
        "model": case.model,
        "certificate": case.certificate,
        "strictly causal": case.strictly_causal if case.model == "contractive_bounded" else None,
        "metric": case.diagonal_scaling if case.is_certified else None,
        "c": case.lipschitz_target,
        "optimiser": case.optimiser,
        "layers": case.num_layers,
        "lr": case.lr,
        "muon lr": case.muon_lr,
        "seeds (failed)": f"{point.num_seeds} ({point.num_failed})",
        "parameters": point.results[0].num_parameters,
        "nats": point.mean("nats"),
        "range": max(nats) - min(nats) if len(nats) > 1 else None,
        "bpc": point.mean("bpc"),
        "gap, nats": None if free is None else gap(point, free),
        "certified": max(point.values("certified")) if certified else None,
        "in norm": f"{point.results[0].norm}, {point.results[0].kind}" if certified else None,
        "estimate, token_max": point.mean("estimate"),
        "recovered": min(point.values("recovered")) if certified else None,
        "evaluations": max(max(r.evaluations) for r in point.results) if certified else None,
    }


def headline(certified: Point | None, free: Point | None) -> str:
    """The best of both kinds and the gap between them."""
    words = []
    for kind, point in (("certified", certified), ("unconstrained", free)):
        said = "not run"
        if point is not None:
            proven = ""
            if point.case.is_certified:
                blocks = "diagonal blocks" if point.results[0].kind == "causal" else "branches"
                bound = max(point.values("certified"))
                proven = f", {blocks} ≤ {bound:.4f} in {point.results[0].norm}"
            said = (
                f"{point.mean('nats'):.3f} nats, {point.mean('bpc'):.3f} bpc ({point}{proven}, "
                f"estimate {point.mean('estimate'):.3g} in token_max)"
            )
        words.append(f"best {kind} {said}")
    if certified and free:
        price = gap(certified, free)
        words.append(f"gap {price:+.3f} nats, {price / LN2:+.3f} bpc")
    return "; ".join(words)


def paper_in_words() -> str:
    """How far the published contractive model is behind dot product at the same depth."""
    pairs = zip(PAPER_DEPTHS, PAPER_NATS["contractive"], PAPER_NATS["dot_product"], strict=False)
    gaps = ", ".join(f"{ours - dot:+.3f} at {depth}" for depth, ours, dot in pairs)
    return f"contractive against dot product, nats by layers: {gaps} (Penn Treebank, recalled)"


# --- the picture ---------------------------------------------------------------------------------


def draw(rows: Rows[Case, Result]) -> Figure:
    """Bits per character against the bound and against the estimate, which proves nothing.

    A marker is a model under a certificate, filled for AdamW and hollow for Muon; a line joins the
    targets c at one depth. Bars span the seeds. Baselines have no bound: lines across that panel.
    """
    points = [p for p in points_of(rows) if math.isfinite(p.mean("nats"))]
    figure, (proven, measured) = panels(1, 2)
    labels = list(dict.fromkeys(p.label for p in points))
    curves = grouped(points, lambda p: (p.label, p.case.optimiser, p.case.num_layers))
    for (label, optimiser, depth), curve in curves.items():
        style: dict[str, Any] = {
            "color": str(round(0.6 * labels.index(label) / max(1, len(labels) - 1), 2)),
            "marker": MARKERS[labels.index(label) % len(MARKERS)],
            "fillstyle": "full" if optimiser == "adamw" else "none",
            "label": f"{label}, {optimiser}, {depth} layers",
        }
        curve.sort(key=lambda point: point.case.lipschitz_target or 0.0)
        bpc = [point.mean("bpc") for point in curve]
        spans = [(min(p.values("bpc")), max(p.values("bpc"))) for p in curve]
        bars = [[y - low for y, (low, _) in zip(bpc, spans, strict=True)],
                [high - y for y, (_, high) in zip(bpc, spans, strict=True)]]  # fmt: skip
        measured.errorbar([p.mean("estimate") for p in curve], bpc, bars, **style)
        if curve[0].case.is_certified:
            proven.errorbar([p.mean("certified") for p in curve], bpc, bars, **style)
        else:
            proven.plot([0, 1], [bpc[0]] * 2, transform=proven.get_yaxis_transform(), **style)
    case, result = rows[0]
    for axes in (proven, measured):
        axes.axhline(result.ngram_nats / LN2, color="0.7", label=f"{NGRAM_ORDER}-gram")
        axes.set(ylabel="bits per character, whole validation split")
    proven.set(
        xlabel="largest certified bound: of branches;\n"
        "of diagonal blocks under a causal certificate",
        title=f"{case.corpus}, {case.num_steps} steps, context {case.seq_len}",
    )
    label = "1 (an estimate below it proves nothing)"
    measured.axvline(1.0, color="0.7", linestyle=":", label=label)
    measured.set(
        xlabel="largest local constant of a branch,\ntoken_max, estimate from below", xscale="log"
    )
    handles, names = measured.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + 0.06 * len(names))
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
