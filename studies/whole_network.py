"""The Lipschitz constant of a whole network, from embedding to logits, and what it buys.

    ‖logits(X) − logits(X′)‖_∞ ≤ L ‖X − X′‖,   ‖X‖ = max_i ‖x_i‖₂,   L = max_v ‖w_v‖₂ Π_l (1 + c_l)

X are the embeddings. Every character's embedding has length √D (RMS 1), there is no position
embedding, no diagonal scaling, no ActNorm and no LayerNorm; w_v is the head's row of character v.
For a total L every branch gets the same c, and the head's rows what is left, L/(1 + c)^(2 layers).
The best c of the grid is chosen by the loss in training. Stacks are bi-Lipschitz:
Π(1 − c_l) ‖X − X′‖ ≤ ‖S(X) − S(X′)‖ ≤ Π(1 + c_l) ‖X − X′‖.

``rms bound`` is the constant of the same network if tokens and logits are measured by their root
mean square, √(D/V) ‖W‖₂ Π(1 + c_l), as is usual beside RMS normalisation.

On the validation windows: the radius around the embeddings in which a prediction is proven to stay
(studies/certified_radius.py), PGD at that radius and at multiples of it, and how far logits move if
embeddings are rounded or noisy, beside L times that change.

Beside it: Newhouse et al. 2025 (arXiv 2507.13338) report 60 % accuracy on Shakespeare at a constant
below 10; their loss of 1.29 nats is on 1.4 % of the split and is 1.779 on all of it. Constants of
different norms are not compared: their loss and accuracy stand beside ours as a mark.
"""

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.config.section import option, section
from invformer.nn.certificate import certify
from invformer.nn.transformer import CharEmbedding, CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.rounding import product_up
from invformer.numerics.spectral_norm import spectral_norm_bound
from studies.attacks import attack_at_radius, logits_of
from studies.certified_radius import certified_radii
from studies.report import (
    Figure,
    Rows,
    Summary,
    by,
    curves,
    look_of,
    mean,
    outcome_of,
    panels,
    values,
)
from studies.study import Study, grid, program
from studies.training import (
    ModelOptions,
    RecipeCase,
    WholeTextConfig,
    new_model,
    scores,
    text_fields,
    text_of,
    train_by_recipe,
    validation_windows,
)

NEWHOUSE_NATS, NEWHOUSE_ACCURACY = 1.779, 0.60  # at a constant below 10
MULTIPLES = (1.0, 1.5, 2.0, 4.0)  # of the certified radius, for attacks
NOISE = 0.01  # length of the noise on an embedding, of its own length


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train for a constant of the whole network, and attack what it certifies."""

    totals: list[float] = option([2, 10, 100], "L of the whole network", "[1, 1e12]")
    c: list[float] = option([0.2], "constants of the branches; the best is kept", "(0, 1)")
    num_seeds: int = option(1, "seeds, from seed on", "[1, 1e4]")
    num_layers: int = option(2, "blocks", "[1, 1e3]")
    lr: float = option(5e-3, "peak learning rate of AdamW", "(0, 10]")
    muon_lr: float = option(2e-2, "peak learning rate of Muon", "(0, 10]")
    num_windows: int = option(16, "validation windows that are attacked", "[1, 1e5]")
    pgd_steps: int = option(20, "gradient steps of an attack", "[1, 1e5]")
    data: WholeTextConfig = section(WholeTextConfig)


@dataclass(frozen=True, kw_only=True)
class Case(RecipeCase):
    """One network and its training."""

    total: float
    c: float
    num_windows: int
    pgd_steps: int


@dataclass(frozen=True)
class Result:
    """What was proven, and what was measured."""

    train_nats: float  # over the last steps
    nats: float  # of the whole validation split in full windows
    accuracy: float  # the same
    bound: float  # proven L, from embedding to logits
    stack_below: float  # Π(1 − c_l)
    stack_above: float  # Π(1 + c_l)
    rms_bound: float  # √(D/V) ‖W‖₂ Π(1 + c_l), between root mean squares
    radius: float  # median certified radius of correct positions, of the length √D
    spacing: float  # the least distance of two embeddings, of the length √D
    flips: list[float]  # share of windows whose attacked prediction changed, at MULTIPLES
    changes: dict[str, float]  # largest change of a logit
    allowed: dict[str, float]  # L times the change of the embeddings


class UnitEmbedding(CharEmbedding):
    """Embeddings of length √D, without positions."""

    def forward(self, tokens: Integer[Tensor, "*batch tokens"], start: int = 0) -> Tensor:
        """The input of the stack."""
        x = nn.functional.pad(self.token(tokens), (0, self.padding))
        return math.sqrt(x.shape[-1]) * nn.functional.normalize(x, dim=-1)


class BoundedHead(nn.Linear):
    """Logits with rows of one length."""

    def __init__(self, d_model: int, vocab_size: int, length: float) -> None:
        super().__init__(d_model, vocab_size)
        self.length = length

    def rows(self) -> Float[Tensor, "vocab width"]:
        """w_v."""
        return self.length * nn.functional.normalize(self.weight, dim=-1)

    def forward(self, input: Tensor) -> Tensor:
        """⟨w_v, z⟩ + b_v."""
        return nn.functional.linear(input, self.rows(), self.bias)


def build(case: Case) -> CharTransformer:
    """A fresh network whose constant is ``case.total`` in exact arithmetic."""
    model = new_model(
        case, name="contractive_bounded", lipschitz_target=case.c, diagonal_scaling=False
    )
    vocab_size, width = model.embedding.token.weight.shape
    model.embedding = UnitEmbedding(vocab_size, case.seq_len, case.d_model, width)
    model.embedding.position.requires_grad_(False)
    model.register_module("norm", nn.Identity())
    left = case.total / (1 + case.c) ** (2 * case.num_layers)
    model.head = BoundedHead(case.d_model, vocab_size, left)
    return model


def cases(options: Options) -> list[Case]:
    """Every total with every c."""
    text = text_fields(options.data, options.seq_len, options.num_windows)
    seeds = range(options.seed, options.seed + options.num_seeds)
    return grid(Case, options, text, seed=seeds, total=options.totals, c=options.c)


def measure(case: Case, device: torch.device) -> Result:
    """Train by Muon as train.py does, then certify and attack in float64."""
    text = text_of(case)
    model = build(case).to(device)
    trained = train_by_recipe(model, case, what=f"L = {case.total:g}")
    model = model.double().eval().requires_grad_(False)
    windows, targets = validation_windows(text, case.seq_len, device)
    nats, accuracy = scores(model, windows, targets)
    return examine(
        model, windows[: case.num_windows], targets[: case.num_windows], case.pgd_steps,
        (trained.final_nats, nats, accuracy),
    )  # fmt: skip


def examine(
    model: CharTransformer,
    windows: Integer[Tensor, "windows tokens"],
    targets: Integer[Tensor, "windows tokens"],
    pgd_steps: int,
    losses: tuple[float, float, float],
) -> Result:
    """Certify the network, attack it, and disturb its embeddings."""
    assert isinstance(model.head, BoundedHead)
    model.head.weight.copy_(model.head.rows())  # what the radii are computed from
    certificate = certify(model, "token_max", dtype=torch.float64)
    assert certificate.total is not None
    bound = product_up(certificate.total, model.head.rows().norm(dim=-1).amax().item(), 1 + 1e-12)
    x = model.embedding(windows)
    length = math.sqrt(x.shape[-1])
    clean = logits_of(model, x)
    correct = clean.argmax(-1) == targets
    radii = certified_radii(model, clean, correct, certificate.total)
    flips = []
    for multiple in MULTIPLES:
        flipped, _ = attack_at_radius(model, x, targets, clean, radii * multiple, pgd_steps)
        flips.append(flipped / max(1, int(correct.any(-1).sum())))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    step = x.abs().amax() / 127
    moved = {
        "bf16": x.bfloat16().to(x),
        "int8": (x / step).round() * step,
        "noise": x + NOISE * length * nn.functional.normalize(noise.to(x), dim=-1),
    }
    constants = list(certificate.per_branch.values())
    symbols = model.embedding(torch.arange(clean.shape[-1], device=x.device)[:, None])[:, 0]
    return Result(
        train_nats=losses[0], nats=losses[1], accuracy=losses[2], bound=bound,
        stack_below=math.prod(1 - c for c in constants),
        stack_above=math.prod(1 + c for c in constants),
        rms_bound=product_up(
            certificate.total, spectral_norm_bound(model.head.rows()).item(),
            math.sqrt(x.shape[-1] / clean.shape[-1]),
        ),
        radius=radii[correct].median().item() / length if correct.any() else math.nan,
        spacing=torch.pdist(symbols).amin().item() / length,
        flips=flips,
        changes={n: (logits_of(model, m) - clean).abs().amax().item() for n, m in moved.items()},
        allowed={
            n: bound * vector_norm(m - x, "token_max").amax().item() for n, m in moved.items()
        },
    )  # fmt: skip


def best_rows(rows: Rows[Case, Result]) -> dict[float, list[tuple[Case, Result]]]:
    """For every total the seeds of the c whose mean training loss is the smallest."""
    return {
        total: min(by(group, "c").values(), key=lambda some: mean(some, "train_nats"))
        for total, group in sorted(by(rows, "total").items())
    }


def summarise(rows: Rows[Case, Result]) -> Summary:
    """One line for each total."""
    table, findings = [], []
    for total, group in best_rows(rows).items():
        results = [result for _, result in group]
        nats, accuracy = mean(group, "nats"), mean(group, "accuracy")
        line = {
            "L asked": total, "c": group[0][0].c, "bound": max(values(group, "bound")),
            "rms bound": max(values(group, "rms_bound")), "nats": nats, "accuracy": accuracy,
            "median radius": mean(group, "radius"), "least distance": min(values(group, "spacing")),
        }  # fmt: skip
        for index, multiple in enumerate(MULTIPLES):
            line[f"flips at {multiple:g}r"] = fmean(r.flips[index] for r in results)
        for name in results[0].changes:
            line[f"{name}, of allowed"] = max(r.changes[name] / r.allowed[name] for r in results)
        table.append(line)
        if total == 10:
            findings.append((accuracy >= NEWHOUSE_ACCURACY, "60 % accuracy at 10"))
        if total in (2, 10):
            findings.append((nats <= NEWHOUSE_NATS, f"1.779 nats at {total:g}"))
    beaten = sum(r.flips[0] > 0 for _, r in rows)
    beyond = sum(r.changes[n] > r.allowed[n] for _, r in rows for n in r.changes)
    above = sum(r.bound > case.total * 1.001 for case, r in rows)
    ours = ", ".join(
        f"L = {line['L asked']:g}: {line['nats']:.3f} nats, {line['accuracy']:.1%}"
        for line in table
    )
    paper = f"Newhouse et al.: {NEWHOUSE_NATS} nats, {NEWHOUSE_ACCURACY:.0%} below 10 (their norm)"
    if beaten or beyond or above:
        why = f"{beaten} attacks inside radii, {beyond} changes and {above} bounds too large: a bug"
        return Summary(table, paper, ours, "not reproduced", why)
    words = "; ".join(f"{name}: {'yes' if held else 'no'}" for held, name in findings)
    why = f"no attack inside a certified radius; {words or 'nothing to compare'}"
    return Summary(table, paper, ours, outcome_of(findings), why)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Loss against the constant; flips against the radius of the attack."""
    best = best_rows(rows)
    figure, (left, right) = panels(1, 2)
    curves(left, [row for group in best.values() for row in group], "total", "nats")
    left.axhline(NEWHOUSE_NATS, color="0.5", linestyle=":", label="Newhouse et al., below 10")
    left.set(xscale="log", xlabel="L, embedding to logits", ylabel="validation nats per character")
    for index, (total, group) in enumerate(best.items()):
        shares = [fmean(flips) for flips in zip(*values(group, "flips"), strict=True)]
        right.plot(MULTIPLES, shares, label=f"L = {total:g}", **look_of(index))
    right.set(xscale="log", xlabel="attack, in certified radii", ylabel="predictions that changed")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
