"""How far embeddings can move before the next character changes: proven, and under attack.

Contractive models of one size are trained on the same text, with LayerNorm before the head
(``contractive``), whose bound is all but vacuous, or without (``contractive_linear``). X is the
stack's input; the radii of studies/certified_radius.py are in units of the text's root mean square
embedding length, so that models of any scale compare.

Attacks: projected gradient ascent (PGD) on one position's margin, with its certified radius and
with multiples of it. An attack that wins inside a certified radius is a bug, and the verdict then
is "not reproduced". A PGD that fails proves nothing.
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
from invformer.numerics.rounding import product_up
from invformer.numerics.spectral_norm import spectral_norm_bound
from studies.certified_radius import MULTIPLES, attacked, draw_flips, feature_constant
from studies.report import Figure, Rows, Summary, by, mean, panels, table, values
from studies.study import Study, grid, program
from studies.training import AdamOptions, ModelCase, new_model, scores, train_by_adam

Kind = Literal["contractive", "contractive_linear"]
TARGET = 0.7  # c of every branch


@dataclass(kw_only=True)
class Options(AdamOptions):
    """Certified embedding radii, and what attacks achieve inside and outside them."""

    num_seeds: int = option(3, "seeds, from seed on", "[1, 1e4]")
    num_windows: int = option(16, "validation windows that are attacked", "[1, 1e5]")
    pgd_steps: int = option(20, "gradient steps of an attack", "[1, 1e5]")
    d_model: int = option(48, "width of the models, channels", "[1, 1e4]")
    num_layers: int = option(2, "blocks of the models", "[1, 1e3]")
    num_steps: int = option(300, "optimiser steps", MANY)


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One model, its training, and everything that is tried on it."""

    kind: Kind
    num_windows: int
    pgd_steps: int


@dataclass(frozen=True)
class Result:
    """What was measured and proven on the attacked windows."""

    nats: float
    accuracy: float
    spacing: float  # the least distance of two characters' embeddings, of their length
    constant: float  # proven from embedding to logits
    radius: float  # median certified relative radius of correct positions
    flips: list[float]  # share of windows whose attacked prediction changed, at MULTIPLES


NAN = math.nan
LOST = Result(NAN, NAN, NAN, NAN, NAN, [0.0] * len(MULTIPLES))  # no finite training


def cases(options: Options) -> list[Case]:
    """Both models with every seed."""
    text = options.data.case_fields(options.seq_len, options.num_windows)
    seeds = range(options.seed, options.seed + options.num_seeds)
    return grid(Case, options, text, seed=seeds, kind=get_args(Kind))


def measure(case: Case, device: torch.device) -> Result:
    """Train, certify and attack; all but the training in float64."""
    model = build_kind(case).to(device)
    if not all(map(math.isfinite, train_by_adam(model, case))):
        return LOST
    windows, targets = case.text.windows(case.seq_len, device)
    model = model.double().eval().requires_grad_(False)
    return examine(model, windows[: case.num_windows], targets[: case.num_windows], case)


def build_kind(case: Case) -> CharTransformer:
    """A fresh model of the kind, in float32."""
    model = new_model(
        case, name="contractive_l2", certificate="token_max", lipschitz_target=TARGET,
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
    length = model.embedding(windows).square().sum(-1).mean().sqrt().item()
    nats, accuracy = scores(model, windows, targets)
    constant = feature_constant(model)
    radius, flips = attacked(model, windows, targets, constant, case.pgd_steps)
    return Result(
        nats=nats,
        accuracy=accuracy,
        spacing=2 * model.embedding.decoding_margin() / length,
        constant=product_up(constant, spectral_norm_bound(model.head.weight).item()),
        radius=radius / length,
        flips=flips,
    )


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
        if group:
            radius = mean(group, "radius")
            words.append(
                f"{kind}: accuracy {mean(group, 'accuracy'):.3f}, L {mean(group, 'constant'):.3g}, "
                f"median certified relative radius {radius:.2g}, "
                f"{radius / mean(group, 'spacing'):.2g} of the least distance of two characters"
            )
    beaten = sum(flips[0] > 0 for flips in values(rows, "flips"))
    must = [(beaten == 0, f"attacks win inside a certified radius in {beaten} models")]
    return Summary(table(trained(rows) or rows, ["kind"]), [(None, said) for said in words], must)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Predictions that changed against the radius of the attack."""
    figure, (axes,) = panels(1, 1)
    for index, (kind, group) in enumerate(by(trained(rows), "kind").items()):
        shares = [fmean(flips) for flips in zip(*values(group, "flips"), strict=True)]
        draw_flips(axes, index, kind, shares)
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
