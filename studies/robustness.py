"""How far embeddings can move before the next character changes: proven, and under attack.

Models of one size are trained on the same text: dot product, tied L2 (both pre-norm), and the
contractive model with its LayerNorm before the head (``contractive``) or without
(``contractive_linear``). X is the stack's input; the radii of studies/certified_radius.py are in
units of the text's root mean square embedding length, so that models of any scale compare. All
positions share one perturbation, so a radius holds for attacks on the whole sequence.

LayerNorm before the head enters the constant by its bound max|γ|/√ε, ε = 1e-5: 316 at γ = 1. That
is sound and all but vacuous. For the pre-norm baselines no certificate exists; they are attacked
only.

Attacks: projected gradient ascent (PGD) on the loss of all positions, in balls of several radii,
and PGD on one position's margin with exactly its certified radius. An attack that wins inside a
certified radius is a bug, and the verdict then is "not reproduced". A PGD that fails proves
nothing. None of the papers reproduced here has this experiment.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.rounding import product_up
from studies.attacks import attack_at_radius, logits_of, pgd, window_nats
from studies.certified_radius import certified_radii, feature_constant, head_norm
from studies.report import Figure, Outcome, Rows, Summary, by, look_of, mean, panels, table, values
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
RADII = (0.001, 0.01, 0.03, 0.1, 0.3)  # of the balls, relative to an embedding's length


@dataclass(kw_only=True)
class Options(AdamOptions):
    """Certified embedding radii, and what attacks achieve inside and outside them."""

    kinds: list[Kind] = option(list(get_args(Kind)), "models")
    num_seeds: int = option(3, "seeds, from seed on", "[1, 1e4]")
    lipschitz_target: float = option(0.7, "c of the contractive kinds", "(0, 1)")
    num_windows: int = option(16, "validation windows that are attacked", "[1, 1e5]")
    pgd_steps: int = option(20, "gradient steps of an attack", "[1, 1e5]")
    d_model: int = option(48, "width of the models, channels", "[1, 1e4]")
    num_layers: int = option(2, "blocks of the models", "[1, 1e3]")
    num_steps: int = option(300, "optimiser steps", MANY)


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One model, its training, and everything that is tried on it."""

    kind: Kind
    lipschitz_target: float
    num_windows: int
    pgd_steps: int


@dataclass(frozen=True)
class Result:
    """What was measured and proven on the attacked windows; None is what has no certificate."""

    nats: float
    accuracy: float
    spacing: float  # the least distance of two characters' embeddings, of their length
    attacked: list[float]  # accuracy under PGD at RADII
    beaten: int  # how often an attack changed a prediction inside its certified radius
    constant: float | None = None  # proven from embedding to logits
    radius: float | None = None  # median certified relative radius of correct positions
    certified: list[float] | None = None  # share of positions correct and certified at RADII
    margin_used: float | None = None  # largest share of a margin lost to an attack at its radius


LOST = Result(math.nan, math.nan, math.nan, [math.nan] * len(RADII), 0)  # no finite training


def cases(options: Options) -> list[Case]:
    """Every model with every seed."""
    text = text_fields(options.data, options.seq_len, options.num_windows)
    seeds = range(options.seed, options.seed + options.num_seeds)
    return grid(Case, options, text, seed=seeds, kind=options.kinds)


def measure(case: Case, device: torch.device) -> Result:
    """Train, certify and attack; all but the training in float64."""
    text = text_of(case)
    model = build_kind(case).to(device)
    if not train_by_adam(model, case).finite:
        return LOST
    windows, targets = validation_windows(text, case.seq_len, device)
    model = model.double().eval().requires_grad_(False)
    return examine(model, windows[: case.num_windows], targets[: case.num_windows], case)


def build_kind(case: Case) -> CharTransformer:
    """A fresh model of the kind, in float32."""
    contractive = case.kind.startswith("contractive")
    model = new_model(
        case, name="contractive_l2" if contractive else case.kind,
        certificate="token_max" if contractive else None, lipschitz_target=case.lipschitz_target,
        activation_norm=False, diagonal_scaling=False,
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
    constant = feature_constant(model)
    radii = None if constant is None else certified_radii(model, clean, correct, constant)
    attacked, beaten = [], 0
    for relative in RADII:
        moved = pgd(model, x, targets, x.new_full(x.shape[:1], relative * length), case.pgd_steps)
        still = logits_of(model, moved).argmax(-1) == targets
        attacked.append(still.double().mean().item())
        if radii is not None:
            reached = vector_norm(moved - x, "token_max").unsqueeze(-1) <= radii
            beaten += int((reached & correct & ~still).sum())
    known = {
        "nats": window_nats(clean, targets).mean().item(),
        "accuracy": correct.double().mean().item(),
        "spacing": 2 * model.embedding.decoding_margin() / length,
        "attacked": attacked,
    }
    if constant is None or radii is None:
        return Result(**known, beaten=0)
    flipped, margin_used = attack_at_radius(model, x, targets, clean, radii, case.pgd_steps)
    held = [correct & (radii >= relative * length) for relative in RADII]
    return Result(
        **known,
        beaten=beaten + flipped,
        constant=product_up(constant, head_norm(model)),
        radius=radii[correct].median().item() / length,
        certified=[which.double().mean().item() for which in held],
        margin_used=margin_used,
    )


# --- what it says --------------------------------------------------------------------------------


def trained(rows: Rows[Case, Result]) -> list[tuple[Case, Result]]:
    """The rows whose training did not lose its numbers."""
    return [row for row in rows if math.isfinite(row[1].nats)]


def summarise(rows: Rows[Case, Result]) -> Summary:
    """A line for each model, means over the seeds that were not lost."""
    words: list[str] = []
    for kind, seeds in by(rows, "kind").items():
        group = trained(seeds)
        if lost := len(seeds) - len(group):
            words.append(f"{kind}: {lost} trainings lost their numbers and count nowhere")
        if not group:
            continue
        said = f"{kind}: accuracy {mean(group, 'accuracy'):.3f}, "
        if group[0][1].radius is None:
            words.append(f"{said}no certificate")
            continue
        radius = mean(group, "radius")
        words.append(
            f"{said}L {mean(group, 'constant'):.3g}, median certified relative radius "
            f"{radius:.2g}, {radius / mean(group, 'spacing'):.2g} of the least distance of two "
            "characters"
        )
    more = {
        f"attacked at {radius:g}": lambda case, result, i=i: result.attacked[i]
        for i, radius in enumerate(RADII)
    }
    beaten = sum(values(rows, "beaten"))
    ours = f"{beaten} attacks beat a certified radius; {'; '.join(words)}"
    paper = "no published value: certified radii of character models are ours"
    lines = table(trained(rows) or rows, ["kind"], more)
    return Summary(lines, paper, ours, *verdict(beaten, rows))


def verdict(beaten: int, rows: Rows[Case, Result]) -> tuple[Outcome, str]:
    """Whether the certificates held."""
    used = [share for share in values(rows, "margin_used") if share is not None]
    if beaten:
        return "not reproduced", f"{beaten} attacks won inside a certified radius: a bug"
    if not used:
        return "not in the paper", "no model with a certificate was among the cases"
    return "not in the paper", (
        f"no attack won inside a certified radius; the strongest used {100 * max(used):.0f} % of a "
        "margin there. A radius below the least distance of two characters covers no exchange of a "
        "character. The pre-norm baselines have no certificate, and LayerNorm's 1/√ε makes that of "
        "contractive vacuous in practice"
    )


def draw(rows: Rows[Case, Result]) -> Figure:
    """Accuracy against the radius, attacked and certified (dotted)."""
    figure, (axes,) = panels(1, 1)
    for index, (kind, group) in enumerate(by(trained(rows), "kind").items()):
        look = look_of(index)
        axes.plot(RADII, means(values(group, "attacked")), label=kind, **look)
        if group[0][1].certified:
            look |= {"label": f"{kind}, certified", "linestyle": ":", "marker": ""}
            axes.plot(RADII, means(values(group, "certified")), **look)
    axes.set(
        xscale="log", xlabel="radius in token_max / RMS embedding length (no unit)",
        ylabel="share of characters predicted correctly", title="PGD",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    return figure


def means(lists: list[list[float]]) -> list[float]:
    """The mean of every place."""
    return [fmean(column) for column in zip(*lists, strict=True)]


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
