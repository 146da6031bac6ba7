"""The price of a certificate: bits per character against the Lipschitz constants of the branches.

Every model is trained under every certificate, target c, optimiser and learning rate, on the same
batches, as ``train.py`` does it. Then, on the trained model:

    bpc         bits per character of the whole validation split, each character once
    certified   the largest proven bound of any residual branch, or of its diagonal blocks under a
                causal certificate, in the norm of the certificate
    estimate    the largest ‖∂f/∂X‖ of any branch f at validation windows, in token_max, from below

Baselines have neither certificate nor c and are trained once. The best learning rates and the best
configuration are chosen on the split they are scored on, baselines and certified alike. The default
is 12 small trainings; docs/results.md has the command of a grid of 114.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.config.schema import MANY, AttentionName, ModelConfig
from invformer.config.section import option
from invformer.data.windows import EvaluationWindows
from invformer.evaluation.likelihood import score
from invformer.evaluation.lipschitz import require_sandwich
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.proof import certify, enforce
from invformer.nn.transformer import CharTransformer
from studies.report import Figure, Name, Rows, Summary, by, curves, look_of, panels, table, values
from studies.study import Study, case_of, program
from studies.training import ModelOptions, RecipeCase, WholeTextConfig, new_model, train_by_recipe

Certificate = Literal["token_max", "causal"]
LN2 = math.log(2)
PROBE_STEPS = 100  # of the power iteration behind an estimate


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train certified and unconstrained models and hold their loss against their constants."""

    models: list[AttentionName] = option(
        ["dot_product", "l2", "contractive_l2", "contractive_bounded"], "attention maps"
    )
    certificates: list[Certificate] = option(["token_max"], "of the contractive models")
    strictly_causal: list[bool] = option([False], "contractive_bounded sees only tokens before")
    diagonal_scaling: list[bool] = option([True], "branches have diagonal scalings")
    lipschitz_targets: list[float] = option([0.5, 0.97], "c of the contractive models", "(0, 1)")
    optimisers: list[Literal["adamw", "muon"]] = option(["adamw", "muon"], "optimisers")
    num_layers: int = option(2, "blocks", "[1, 1e3]")
    lr: float = option(8e-3, "peak learning rate of AdamW", "(0, 10]")
    muon_lr: list[float] = option([2e-2], "the same of Muon, the best counts", "(0, 10]")
    seq_len: int = option(64, "context, characters", "[2, 1e5]")
    num_steps: int = option(400, "optimiser steps", MANY)
    num_windows: int = option(4, "validation windows for estimates", "[1, 1e4]")
    data: WholeTextConfig = field(default_factory=WholeTextConfig)


@dataclass(frozen=True, kw_only=True)
class Case(RecipeCase):
    """One model and everything about its training; None is what a baseline does not have."""

    model: AttentionName
    certificate: Certificate | None
    strictly_causal: bool
    diagonal_scaling: bool
    lipschitz_target: float | None
    num_windows: int

    @property
    def optimiser(self) -> str:
        """By its name."""
        return "adamw" if self.muon_lr is None else "muon"


@dataclass(frozen=True)
class Result:
    """What one trained model is worth; no nats are finite where the training lost its numbers."""

    ngram_nats: float  # of a 5-gram of the same text on the same characters
    num_characters: int
    nats: float = math.inf  # per character of the whole validation split
    estimate: float = math.nan
    certified: float | None = None

    @property
    def bpc(self) -> float:
        """Bits per character."""
        return self.nats / LN2


def cases(options: Options) -> list[Case]:
    """The whole grid; what would be the same training stands once."""
    text = options.data.case_fields(options.seq_len)
    found = [
        case_of(
            Case, options, model=model, certificate=certificate, strictly_causal=strictly,
            diagonal_scaling=scaled, lipschitz_target=target, muon_lr=muon_lr, **text,
        )
        for model in options.models
        for certificate, strictly, scaled, target in constraints(model, options)
        for optimiser in options.optimisers
        for muon_lr in (options.muon_lr if optimiser == "muon" else [None])
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def constraints(
    model: AttentionName, options: Options
) -> Iterable[tuple[Certificate | None, bool, bool, float | None]]:
    """Certificate, strictly causal or not, scaled or not, and c: what applies to a model."""
    if not model.startswith("contractive"):
        return [(None, False, False, None)]
    strictly = options.strictly_causal if model == "contractive_bounded" else [False]
    rest = options.diagonal_scaling, options.lipschitz_targets
    return itertools.product(options.certificates, strictly, *rest)


def measure(case: Case, device: torch.device) -> Result:
    """Train one model, then score, certify and probe it."""
    text = case.text
    model, losses = train(case, device)
    model.eval()
    result = Result(text.ngram_nats, len(text.val))
    finite = all(map(math.isfinite, losses)) and all(p.isfinite().all() for p in model.parameters())
    if not finite:
        return result
    certificate = enforce(model) if case.certificate else None
    windows = EvaluationWindows(text.val, case.seq_len, case.seq_len, case.batch_size)
    nats = score(model, windows, device).nats
    # Windows at equal distances over the whole text: its beginning may be its easiest part.
    starts = torch.linspace(0, len(text.val) - case.seq_len, case.num_windows, dtype=torch.float64)
    probe = text.val[starts.long()[:, None] + torch.arange(case.seq_len)].long().to(device)
    certified = certificate and certificate.bound_max
    return replace(result, nats=nats, estimate=largest_estimate(model, probe), certified=certified)


def train(case: Case, device: torch.device) -> tuple[CharTransformer, list[float]]:
    """A fresh model of the case, trained as ``train.py`` would with these options."""
    model = new_model(
        case, name=case.model, certificate=case.certificate, strictly_causal=case.strictly_causal,
        diagonal_scaling=case.diagonal_scaling, activation_norm=not case.diagonal_scaling,
        lipschitz_target=case.lipschitz_target or ModelConfig.lipschitz_target,
    ).to(device)  # fmt: skip
    return model, train_by_recipe(model, case)


def largest_estimate(model: CharTransformer, windows: Integer[Tensor, "count seq_len"]) -> float:
    """The largest local constant of any branch in token_max, from below.

    Raises:
        CertificateViolation: a branch's estimate exceeds its own bound.
    """
    found = LipschitzProbe(model, windows, "token_max", thorough=True).estimate(PROBE_STEPS)
    estimates = {name: value.max().item() for name, (value, _) in found.items()}
    if model.is_invertible:
        bounds = certify(model, "token_max", kind="global").per_branch
        for name, estimate in estimates.items():
            require_sandwich(f"token_max/{name}", {"estimate": estimate, "bound": bounds[name]})
    return max(estimates.values())


CONFIGURATION = (
    "model", "certificate", "strictly_causal", "diagonal_scaling", "lipschitz_target", "optimiser",
)  # fmt: skip


def best_rates(rows: Rows[Case, Result]) -> list[tuple[Case, Result]]:
    """Every configuration at the learning rate with the smallest loss."""
    return [min(group, key=loss) for group in by(rows, *CONFIGURATION).values()]


def loss(row: tuple[Case, Result]) -> float:
    """Nats per character; infinite if the training failed."""
    return row[1].nats


def label(case: Case, result: Result) -> str:
    """Model and certificate, whether tokens see only those before them, and scalings."""
    strictly = "strictly" if case.strictly_causal else None
    scaled = "scaled" if case.diagonal_scaling else None
    return " ".join(filter(None, (case.model, case.certificate, strictly, scaled)))


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every configuration, and the best certified beside the best unconstrained one."""
    kept = best_rates(rows)
    finite = [row for row in kept if loss(row) < math.inf]
    trained = by(finite, lambda case, _: bool(case.certificate))
    best = {certified: min(group, key=loss) for certified, group in trained.items()}
    said = [
        f"best {'certified' if certified else 'unconstrained'} {described(*row)}"
        for certified, row in best.items()
    ]
    gap = loss(best[True]) - loss(best[False]) if len(best) == 2 else math.nan
    said.append(f"gap {gap:+.3f} nats, {gap / LN2:+.3f} bpc")
    said.append(f"5-gram {rows[0][1].ngram_nats:.3f} nats")
    said.append(f"{values(kept, 'nats').count(math.inf)} of the best rates' trainings failed")
    more: dict[str, Name] = {"bpc": "bpc"}
    if False in best:
        more["gap, nats"] = lambda case, result: result.nats - loss(best[False])
    names = (*CONFIGURATION, "muon_lr")
    lines = table(kept, names, more, without=("ngram_nats", "num_characters"))
    return Summary(lines, [(None, words) for words in said])


def described(case: Case, result: Result) -> str:
    """A configuration and its numbers."""
    bound = f", bound {result.certified:.4f}" if result.certified else ""
    numbers = f"{result.nats:.3f} nats, {result.bpc:.3f} bpc, estimate {result.estimate:.3g}"
    return f"{numbers}{bound} ({label(case, result)}, {case.optimiser})"


def draw(rows: Rows[Case, Result]) -> Figure:
    """Bits per character against the bound and against the estimate, which proves nothing.

    A line joins the trainings of a model under a certificate and optimiser. Baselines have no
    bound: lines across that panel.
    """
    figure, (proven, measured) = panels(1, 2)
    kept = [row for row in best_rates(rows) if loss(row) < math.inf]
    for index, (key, group) in enumerate(by(kept, label, "optimiser").items()):
        words, look = ", ".join(key), look_of(index)
        curves(measured, group, "estimate", "bpc", label=words, **look)
        if group[0][0].certificate:
            curves(proven, group, "certified", "bpc", **look)
        else:
            proven.axhline(group[0][1].bpc, **look)
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


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
