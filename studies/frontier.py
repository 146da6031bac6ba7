"""The price of a certificate: bits per character against the Lipschitz constants of the branches.

Every model is trained under every certificate, target c, optimiser, depth, learning rate and seed,
on the same batches, with the schedule and the clipping of ``train.py``. Then, on the trained model:

    bpc         bits per character of the whole validation split, each character once
    certified   the largest proven bound of any residual branch, or of its diagonal blocks under a
                causal certificate, in the norm of the certificate
    estimate    the largest ‖∂f/∂X‖ of any branch f at validation windows, in token_max, from below
    inversion   characters recovered from the top of the stack, and what that costs

Baselines have neither certificate nor c and are trained once. The best learning rates and the best
configuration are chosen on the split they are scored on, baselines and certified alike. The paper:
Kim et al. 2021, whose contractive models are far behind at equal depth.

The default is 12 small trainings; docs/results.md has the command of a grid of 114.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.config.schema import MANY, AttentionName, CertificateName, ModelConfig
from invformer.config.section import option, section
from invformer.data.windows import EvaluationWindows
from invformer.evaluation.inversion import round_trip
from invformer.evaluation.likelihood import score
from invformer.evaluation.lipschitz import require_sandwich
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.certificate import certify, enforce
from invformer.nn.transformer import CharTransformer
from studies.depth_stability import PAPER_DEPTHS, PAPER_NATS
from studies.report import Figure, Rows, Summary, by, grouped, look_of, mean, panels, values
from studies.study import Study, case_of, program
from studies.training import (
    ModelOptions,
    RecipeCase,
    Training,
    WholeTextConfig,
    new_model,
    text_fields,
    text_of,
    train_by_recipe,
)

Optimiser = Literal["adamw", "muon"]
LN2 = math.log(2)


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train certified and unconstrained models and hold their loss against their constants."""

    models: list[AttentionName] = option(
        ["dot_product", "l2", "contractive_l2", "contractive_bounded"], "attention maps"
    )
    certificates: list[CertificateName] = option(["token_max"], "kim_* are for tied L2 alone")
    strictly_causal: list[bool] = option([False], "contractive_bounded sees only tokens before")
    diagonal_scaling: list[bool] = option([True], "branches contract in metrics of their own")
    lipschitz_targets: list[float] = option([0.5, 0.97], "c of the contractive models", "(0, 1)")
    optimisers: list[Optimiser] = option(["adamw", "muon"], "optimisers")
    depths: list[int] = option([2], "numbers of blocks", "[1, 1e3]")
    num_seeds: int = option(1, "seeds, from seed on", "[1, 1e4]")
    lr: list[float] = option([8e-3], "peak learning rates of AdamW, the best counts", "(0, 10]")
    muon_lr: list[float] = option([2e-2], "the same of Muon, with each lr", "(0, 10]")
    weight_decay: float = option(0.0, "decoupled weight decay", "[0, 100]")
    seq_len: int = option(64, "context, characters", "[2, 1e5]")
    num_steps: int = option(400, "optimiser steps", MANY)
    num_windows: int = option(4, "validation windows for estimates and inversion", "[1, 1e4]")
    probe_steps: int = option(100, "power iteration steps per estimate", MANY)
    data: WholeTextConfig = section(WholeTextConfig)


@dataclass(frozen=True, kw_only=True)
class Case(RecipeCase):
    """One model, everything about its training, and how it is measured."""

    model: AttentionName
    certificate: CertificateName | None  # None for baselines
    strictly_causal: bool
    diagonal_scaling: bool
    lipschitz_target: float | None  # None for baselines
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
    ngram_nats: float  # of a 5-gram of the same text on the same characters
    num_characters: int
    num_parameters: int
    steps_taken: int  # fewer than asked for after a non-finite loss
    norm: str = ""  # in which the certificate is stated; empty for baselines
    kind: str = ""  # global, or causal where the bounds are those of the diagonal Jacobian blocks
    certified: float | None = None  # largest bound of a branch or of its diagonal blocks
    certified_token_max: float | None = None  # of a branch in token_max, above ``estimate``
    certified_total: float | None = None  # of the whole stack in ``norm``; None unless global
    estimate: float = math.nan  # largest local constant of a branch, token_max, from below
    residual: float = math.nan  # how far that is from stationary, relative to its value
    recovered: float | None = None  # share of the windows' characters that come back
    evaluations: list[int] = field(default_factory=list)  # of every branch, by the inversion

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
) -> Iterable[tuple[CertificateName | None, bool, bool, float | None]]:
    """Certificate, strictly causal or not, in metrics or not, and c: what applies to a model."""
    if not model.startswith("contractive"):
        return [(None, False, False, None)]
    rest = options.diagonal_scaling, options.lipschitz_targets
    if model != "contractive_bounded":
        return itertools.product(options.certificates, [False], *rest)
    # Kim's theorems are about tied attention: what is in the unit ball is held in token_max.
    held: list[CertificateName] = [
        "token_max" if name.startswith("kim_") else name for name in options.certificates
    ]
    return itertools.product(held, options.strictly_causal, *rest)


def rates(options: Options) -> list[tuple[Optimiser, float, float | None]]:
    """Every optimiser with its learning rates: AdamW has one, Muon two."""
    return [
        (optimiser, lr, muon_lr)
        for optimiser in options.optimisers
        for lr in options.lr
        for muon_lr in (options.muon_lr if optimiser == "muon" else [None])
    ]


def measure(case: Case, device: torch.device) -> Result:
    """Train one model, then score, certify, probe and invert it."""
    text = text_of(case)
    model, trained = train(case, device)
    model.eval()
    lost = Result(
        nats=math.nan, bpc=math.nan, train_nats=trained.final_nats,
        ngram_nats=text.ngram_nats, num_characters=len(text.val),
        num_parameters=sum(p.numel() for p in model.parameters()),
        steps_taken=len(trained.losses),
    )  # fmt: skip
    if not (trained.finite and all(p.isfinite().all() for p in model.parameters())):
        return lost
    certificate = enforce(model) if case.is_certified else None
    windows = EvaluationWindows(text.val, case.seq_len, case.seq_len, case.batch_size)
    likelihood = score(model, windows, device)
    probe = spread_windows(text.val, case.seq_len, case.num_windows).to(device)
    numbers = local_constant(model, probe, case.probe_steps)
    if certificate is not None:
        found = round_trip(model, probe, certificate, dtype=torch.float64).numbers()
        numbers |= {
            "norm": certificate.norm, "kind": certificate.kind,
            "certified": certificate.bound_max, "certified_total": certificate.total,
            "recovered": found["characters_recovered"],
            "evaluations": [found["num_evaluations"][name] for name in certificate.per_branch],
        }  # fmt: skip
    return replace(lost, nats=likelihood.nats, bpc=likelihood.bpc, **numbers)


def train(case: Case, device: torch.device) -> tuple[CharTransformer, Training]:
    """A fresh model of the case, trained as ``train.py`` would with these options."""
    model = new_model(
        case, name=case.model, certificate=case.certificate, strictly_causal=case.strictly_causal,
        diagonal_scaling=case.diagonal_scaling, activation_norm=not case.diagonal_scaling,
        lipschitz_target=case.lipschitz_target or ModelConfig.lipschitz_target,
    ).to(device)  # fmt: skip
    return model, train_by_recipe(model, case, case.weight_decay)


def spread_windows(
    tokens: Integer[Tensor, "characters"], seq_len: int, count: int
) -> Integer[Tensor, "count seq_len"]:
    """Windows at equal distances over a whole text: its beginning may be its easiest part."""
    starts = torch.linspace(0, len(tokens) - seq_len, count, dtype=torch.float64).long()
    return tokens[starts[:, None] + torch.arange(seq_len)].long()


def local_constant(
    model: CharTransformer, windows: Integer[Tensor, "count seq_len"], num_steps: int
) -> dict[str, Any]:
    """The largest local constant of any branch in token_max, its residual, and the largest bound.

    Raises:
        CertificateViolation: a branch's estimate exceeds its own bound.
    """
    estimates = LipschitzProbe(model, windows, "token_max", thorough=True).estimate(num_steps)
    bounds: dict[str, float] = {}
    if model.is_invertible:
        bounds = certify(model, "token_max", model.head.weight.dtype, "global").per_branch
    for name, (value, _) in estimates.items():
        pair = {"estimate": value.max().item(), "bound": bounds.get(name)}
        require_sandwich(f"token_max/{name}", pair)
    values, residuals = (torch.cat(each) for each in zip(*estimates.values(), strict=True))
    largest = {"estimate": values.max().item(), "residual": residuals[values.argmax()].item()}
    return largest | {"certified_token_max": max(bounds.values(), default=None)}


# --- the seeds of every configuration together ---------------------------------------------------

CONSTRAINT = ("certificate", "strictly_causal", "diagonal_scaling", "lipschitz_target")
CONFIGURATION = ("model", *CONSTRAINT, "optimiser", "num_layers")
RATES = ("lr", "muon_lr")
Seeds = Rows[Case, Result]


def best_rates(rows: Rows[Case, Result]) -> list[Seeds]:
    """Every configuration at the learning rates with the fewest failures, then the fewest nats."""
    return [min(by(g, *RATES).values(), key=cost) for g in by(rows, *CONFIGURATION).values()]


def finite(seeds: Seeds) -> Seeds:
    """The seeds whose training did not fail, or all if every one did."""
    return [row for row in seeds if not row[1].failed] or seeds


def loss(seeds: Seeds) -> float:
    """Mean nats per character of these; infinite if every training failed."""
    nats = mean(finite(seeds), "nats")
    return math.inf if math.isnan(nats) else nats


def cost(seeds: Seeds) -> tuple[int, float]:
    """Fewest failed seeds first, then the smallest loss."""
    return sum(values(seeds, "failed")), loss(seeds)


def best_of(points: Sequence[Seeds], certified: bool) -> Seeds | None:
    """The best certified or the best unconstrained configuration; None if none has a loss."""
    kept = [s for s in points if s[0][0].is_certified == certified and loss(s) < math.inf]
    return min(kept, key=cost, default=None)


def label(case: Case, result: Result | None = None) -> str:
    """Model and certificate, whether tokens see only those before them, and metrics."""
    strictly = "strictly" if case.strictly_causal else None
    metric = "metric" if case.diagonal_scaling else None
    return " ".join(filter(None, (case.model, case.certificate, strictly, metric)))


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every configuration, and the best certified beside the best unconstrained one."""
    points = best_rates(rows)
    lines, gaps = list[dict[str, Any]](), list[str]()
    for depth, same in grouped(points, lambda seeds: seeds[0][0].num_layers).items():
        certified, free = best_of(same, True), best_of(same, False)
        lines += [table_line(seeds, free) for seeds in same]
        if certified and free:
            gaps.append(f"{loss(certified) - loss(free):+.3f} at {depth}")
    case, result = rows[0]
    certified, free = best_of(points, True), best_of(points, False)
    price = loss(certified) - loss(free) if certified and free else math.nan
    ours = (
        f"{described('certified', certified)}; {described('unconstrained', free)}; gap "
        f"{price:+.3f} nats, {price / LN2:+.3f} bpc; by layers: {', '.join(gaps) or 'not run'}; "
        f"5-gram {result.ngram_nats:.3f} nats; {case.corpus}, all {result.num_characters} "
        f"validation characters once, context {case.seq_len}, {case.num_steps} steps"
    )
    why = (
        "no frontier is published; learning rates and best rows are chosen on the split they are "
        f"scored on, {len(points[0])} seed{'s' if len(points[0]) > 1 else ''} each; "
        f"{sum(cost(seeds)[0] for seeds in points)} of the best learning rates' trainings failed"
    )
    pairs = zip(PAPER_DEPTHS, PAPER_NATS["contractive"], PAPER_NATS["dot_product"], strict=False)
    published = ", ".join(f"{ours - dot:+.3f} at {depth}" for depth, ours, dot in pairs)
    paper = f"contractive against dot product, nats by layers: {published} (PTB, recalled)"
    return Summary(lines, paper, ours, "not in the paper", why)


def table_line(seeds: Seeds, free: Seeds | None) -> dict[str, Any]:
    """One configuration, mean over its seeds, beside the best unconstrained one of its depth."""
    kept = finite(seeds)
    (case, result), nats = kept[0], values(kept, "nats")
    line = {name: getattr(case, name) for name in (*CONFIGURATION, *RATES)} | {
        "seeds (failed)": f"{len(seeds)} ({cost(seeds)[0]})",
        "parameters": result.num_parameters,
        "nats": fmean(nats),
        "range": max(nats) - min(nats) if len(nats) > 1 else None,
        "bpc": mean(kept, "bpc"),
        "gap, nats": fmean(nats) - loss(free) if free else None,
        "estimate, token_max": mean(kept, "estimate"),
    }
    if not case.is_certified or result.failed:
        return line
    return line | {
        "certified": max(values(kept, "certified")),
        "in norm": f"{result.norm}, {result.kind}",
        "recovered": min(values(kept, "recovered")),
        "evaluations": max(map(max, values(kept, "evaluations"))),
    }


def described(kind: str, seeds: Seeds | None) -> str:
    """The best configuration of a kind."""
    if seeds is None:
        return f"best {kind} not run"
    kept = finite(seeds)
    case, result = kept[0]
    said = f"{label(case)}, {case.optimiser}, {case.num_layers} layers"
    if case.is_certified:
        blocks = "diagonal blocks" if result.kind == "causal" else "branches"
        bound = max(values(kept, "certified"))
        said += f", c={case.lipschitz_target:g}, {blocks} ≤ {bound:.4f} in {result.norm}"
    return (
        f"best {kind} {loss(seeds):.3f} nats, {mean(kept, 'bpc'):.3f} bpc ({said}, "
        f"estimate {mean(kept, 'estimate'):.3g} in token_max)"
    )


def draw(rows: Rows[Case, Result]) -> Figure:
    """Bits per character against the bound and against the estimate, which proves nothing.

    A line joins the targets c of a model under a certificate, optimiser and depth; dots are seeds.
    Baselines have no bound: lines across that panel.
    """
    figure, (proven, measured) = panels(1, 2)
    kept = [row for seeds in best_rates(rows) for row in seeds if not row[1].failed]
    for index, (key, group) in enumerate(by(kept, label, "optimiser", "num_layers").items()):
        style = {"label": "{}, {}, {} layers".format(*key), **look_of(index)}
        group.sort(key=lambda row: row[0].lipschitz_target or 0)
        targets = by(group, "lipschitz_target").values()
        for axes, x in ((measured, "estimate"), (proven, "certified")):
            if x == "certified" and not group[0][0].is_certified:
                axes.axhline(mean(group, "bpc"), **style)
                continue
            axes.plot([mean(g, x) for g in targets], [mean(g, "bpc") for g in targets], **style)
            axes.plot(values(group, x), values(group, "bpc"), ".", color=style["color"])
    case, result = rows[0]
    for axes in (proven, measured):
        axes.axhline(result.ngram_nats / LN2, color="0.7", label="5-gram")
        axes.set(ylabel="bits per character, whole validation split")
    proven.set(xlabel="largest certified bound of a branch (causal: of its diagonal blocks)")
    proven.set(title=f"{case.corpus}, {case.num_steps} steps, context {case.seq_len}")
    measured.axvline(1.0, color="0.7", linestyle=":", label="1 (an estimate proves nothing)")
    measured.set(xlabel="largest local constant of a branch, token_max, from below", xscale="log")
    handles, names = measured.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + 0.06 * len(names))
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
