"""How far embeddings can move before the next character changes: proven, and under attack.

Models of one size are trained on the same text: dot product, tied L2 (both pre-norm), and the
contractive model with its LayerNorm before the head (``contractive``) or without
(``contractive_linear``). X is the stack's input; the radii of studies/certified_radius.py are in
units of the text's root mean square embedding length, so that models of any scale compare. All
positions share one perturbation, so a radius holds for attacks on the whole sequence.

LayerNorm before the head enters the constant by its bound max|γ|/√ε, ε = 1e-5: 316 at γ = 1. That
is sound and all but vacuous. For the pre-norm baselines no certificate exists; they are attacked
only.

Attacks: projected gradient ascent (PGD) on the loss of all positions, in balls of both norms, and
PGD on one position's margin with exactly its certified radius. An attack that wins inside a
certified radius is a bug, and the verdict then is "not reproduced". A PGD that fails proves
nothing. None of the papers reproduced here has this experiment.
"""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.rounding import product_up
from studies.attacks import attack_at_radius, left_over, logits_of, nats_of, pgd
from studies.certified_radius import NORMS, BallNorm, certified_radii, feature_constants, head_norm
from studies.report import Figure, Outcome, Rows, Summary, by, look_of, mean, panels, values
from studies.study import Study, grid, program
from studies.training import (
    AdamOptions,
    ModelCase,
    new_model,
    text_fields,
    text_of,
    train_by_adam,
    validation_windows,
)

Kind = Literal["dot_product", "l2", "contractive", "contractive_linear"]
LEFT = ("nats", "accuracy", "flips")  # what every attack is judged by
RADII = ("token_max_radii", "frobenius_radii")


@dataclass(kw_only=True)
class Options(AdamOptions):
    """Certified embedding radii, and what attacks achieve inside and outside them."""

    kinds: list[Kind] = option(list(get_args(Kind)), "models")
    num_seeds: int = option(3, "seeds, from seed on", "[1, 1e4]")
    lipschitz_target: float = option(0.7, "c of the contractive kinds", "(0, 1)")
    activation_norm: bool = option(
        False, "ActivationNorm in the contractive kinds; its scales multiply the constant"
    )
    token_max_radii: list[float] = option(
        [0.001, 0.01, 0.03, 0.1, 0.3], "relative radii of the balls in token_max", "(0, 1e6]"
    )
    frobenius_radii: list[float] = option(
        [0.001, 0.01, 0.1, 0.3, 1.0], "relative radii of the balls in frobenius", "(0, 1e6]"
    )
    num_windows: int = option(16, "validation windows that are attacked", "[1, 1e5]")
    pgd_steps: int = option(20, "gradient steps of an attack", "[1, 1e5]")
    d_model: int = option(48, "width of the models, channels", "[1, 1e4]")
    num_layers: int = option(2, "blocks of the models", "[1, 1e3]")
    num_steps: int = option(300, "optimiser steps", MANY)

    def check(self) -> None:
        """Heads divide the width, and there is something to attack."""
        super().check()
        for name in RADII:
            if not getattr(self, name):
                self.refuse(name, "give at least one")


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One model, its training, and everything that is tried on it."""

    kind: Kind
    lipschitz_target: float
    activation_norm: bool
    token_max_radii: tuple[float, ...]
    frobenius_radii: tuple[float, ...]
    num_windows: int
    pgd_steps: int

    def __post_init__(self) -> None:
        for name in RADII:
            object.__setattr__(self, name, tuple(getattr(self, name)))  # CSV cells are lists

    def radii(self, norm: BallNorm) -> tuple[float, ...]:
        """Relative radii of the balls in a norm."""
        return self.token_max_radii if norm == "token_max" else self.frobenius_radii


@dataclass(frozen=True)
class Result:
    """What was proven and measured; by norm, lists follow the options' radii."""

    nats: float  # clean, on the attacked windows; NaN after a non-finite loss
    accuracy: float  # clean share of correct predictions
    length: float  # root mean square length of an embedding, the unit of relative radii
    spacing: float  # the least distance of two characters' embeddings, relative to ``length``
    constants: dict[str, float]  # proven from embedding to logits; empty without certificate
    radii: dict[str, float]  # median certified relative radius over correct positions
    certified: dict[str, list[float]]  # share of positions correct and certified at every radius
    attacks: dict[str, list[list[float]]]  # nats, accuracy and flips under PGD at every radius
    beaten: int  # how often an attack changed a prediction inside its certified radius
    margin_used: dict[str, float]  # largest share of a margin lost to an attack at its radius


NAN = math.nan
NOTHING = Result(NAN, NAN, NAN, NAN, {}, {}, {}, {}, 0, {})  # of a training that was lost


def cases(options: Options) -> list[Case]:
    """Every model with every seed."""
    text = text_fields(options.data, options.seq_len, options.num_windows)
    radii = {name: tuple(sorted(getattr(options, name))) for name in RADII}
    seeds = range(options.seed, options.seed + options.num_seeds)
    return grid(Case, options, text | radii, seed=seeds, kind=options.kinds)


def measure(case: Case, device: torch.device) -> Result:
    """Train, certify and attack; all but the training in float64."""
    text = text_of(case)
    model = build_kind(case).to(device)
    if not train_by_adam(model, case).finite:
        return NOTHING
    windows, targets = validation_windows(text, case.seq_len, device)
    model = model.double().eval().requires_grad_(False)
    return examine(model, windows[: case.num_windows], targets[: case.num_windows], case)


def build_kind(case: Case) -> CharTransformer:
    """A fresh model of the kind, in float32."""
    contractive = case.kind.startswith("contractive")
    model = new_model(
        case, name="contractive_l2" if contractive else case.kind,
        certificate="token_max" if contractive else None, lipschitz_target=case.lipschitz_target,
        activation_norm=case.activation_norm, diagonal_scaling=False,
    )  # fmt: skip
    if case.kind == "contractive_linear":
        model.register_module("norm", nn.Identity())
    return model


def examine(
    model: CharTransformer,
    windows: Int[Tensor, "windows tokens"],
    targets: Int[Tensor, "windows tokens"],
    case: Case,
) -> Result:
    """Certify and attack one model."""
    x = model.embedding(windows).detach()
    length = x.square().sum(-1).mean().sqrt().item()
    clean = logits_of(model, x)
    correct = clean.argmax(-1) == targets
    constants = feature_constants(model)
    radii: dict[BallNorm, Tensor] = {
        norm: certified_radii(model, clean, correct, L) for norm, L in constants.items()
    }
    attacks: dict[str, list[list[float]]] = {}
    beaten = 0
    for norm in NORMS:
        attacks[norm] = []
        for relative in case.radii(norm):
            moved = pgd(
                model, x, targets, norm, x.new_full(x.shape[:1], relative * length), case.pgd_steps
            )
            logits = logits_of(model, moved)
            attacks[norm].append(list(left_over(logits, targets, correct)))
            if norm in radii:
                reached = vector_norm(moved - x, norm).unsqueeze(-1) <= radii[norm]
                beaten += int((reached & correct & (logits.argmax(-1) != targets)).sum())
    margin_used = {}
    for norm, found in radii.items():
        flipped, margin_used[norm] = attack_at_radius(
            model, x, targets, clean, correct, norm, found, case.pgd_steps
        )
        beaten += flipped
    return Result(
        nats=nats_of(clean, targets),
        accuracy=correct.double().mean().item(),
        length=length,
        spacing=2 * model.embedding.decoding_margin() / length,
        constants={norm: product_up(L, head_norm(model)) for norm, L in constants.items()},
        radii={norm: found[correct].median().item() / length for norm, found in radii.items()},
        certified={
            norm: [
                (correct & (found >= relative * length)).double().mean().item()
                for relative in case.radii(norm)
            ]
            for norm, found in radii.items()
        },
        attacks=attacks,
        beaten=beaten,
        margin_used=margin_used,
    )


# --- what it says --------------------------------------------------------------------------------


def trained(rows: Rows[Case, Result]) -> dict[Kind, list[tuple[Case, Result]]]:
    """The seeds of every model whose training stayed finite."""
    return by([row for row in rows if math.isfinite(row[1].nats)], "kind")


def summarise(rows: Rows[Case, Result]) -> Summary:
    """One line per model and ball, means over seeds."""
    lines: list[dict[str, Any]] = []
    words: list[str] = []
    for kind, group in trained(rows).items():
        case, first = group[0]
        nats, accuracy = mean(group, "nats"), mean(group, "accuracy")
        words.append(f"{kind}: accuracy {accuracy:.3f}, no certificate")
        if first.radii:
            radius = fmean(r.radii["token_max"] for _, r in group)
            constant = fmean(r.constants["token_max"] for _, r in group)
            words[-1] = (
                f"{kind}: accuracy {accuracy:.3f}, L {constant:.3g}, median certified relative "
                f"radius {radius:.2g} (token_max), {radius / mean(group, 'spacing'):.2g} of the "
                "least distance of two characters"
            )
        for norm in NORMS:
            for index, relative in enumerate(case.radii(norm)):
                left = zip(*(r.attacks[norm][index] for _, r in group), strict=True)
                line = {"kind": kind, "attack": f"PGD {norm}", "strength": relative}
                line |= {"clean nats": nats, "clean accuracy": accuracy}
                line |= dict(zip(LEFT, map(fmean, left), strict=True))
                if norm in first.radii:
                    certified = [r.certified[norm][index] for _, r in group]
                    line["certified accuracy"] = fmean(certified)
                    line["median certified radius"] = fmean(r.radii[norm] for _, r in group)
                lines.append(line)
    lost = Counter(case.kind for case, result in rows if not math.isfinite(result.nats))
    for kind, count in lost.items():
        lines.append({"kind": kind, "attack": f"{count} trainings failed"})
        words.append(f"{kind}: {count} trainings lost their numbers and count nowhere")
    paper = "no published value: certified radii of character models are ours"
    beaten = sum(values(rows, "beaten"))
    ours = f"{beaten} attacks beat a certified radius; {'; '.join(words)}"
    return Summary(lines, paper, ours, *verdict(beaten, rows))


def verdict(beaten: int, rows: Rows[Case, Result]) -> tuple[Outcome, str]:
    """Whether the certificates held."""
    used = [share for _, result in rows for share in result.margin_used.values()]
    if beaten:
        return "not reproduced", f"{beaten} attacks won inside a certified radius: a bug"
    if not used:
        return "not in the paper", "no trained model with a certificate was among the cases"
    return "not in the paper", (
        f"no attack won inside a certified radius; the strongest used {100 * max(used):.0f} % of a "
        "margin there. A radius below the least distance of two characters covers no exchange of a "
        "character. The pre-norm baselines have no certificate, and LayerNorm's 1/√ε makes that of "
        "contractive vacuous in practice"
    )


def draw(rows: Rows[Case, Result]) -> Figure:
    """Accuracy against the radius in both norms, attacked and certified (dotted)."""
    figure, axes = panels(1, 2)
    for norm, one in zip(NORMS, axes, strict=True):
        for index, (kind, group) in enumerate(trained(rows).items()):
            radii, look = group[0][0].radii(norm), look_of(index)
            attacked = [[a[1] for a in r.attacks[norm]] for _, r in group]
            one.plot(radii, torch.tensor(attacked).mean(0), label=kind, **look)
            if proven := [r.certified[norm] for _, r in group if norm in r.certified]:
                look |= {"label": f"{kind}, certified", "linestyle": ":", "marker": ""}
                one.plot(radii, torch.tensor(proven).mean(0), **look)
        one.set(
            xscale="log", xlabel=f"radius in {norm} / RMS embedding length (no unit)",
            ylabel="share of characters predicted correctly", title=f"PGD in {norm}",
        )  # fmt: skip
        one.set_ylim(bottom=0)
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
