"""Yudin et al. 2025 (JaSMin): local bounds from attention weights, and training that shapes them.

Bounds: every upper bound on ‖∂F/∂X‖ (frobenius) of attention layers beside the truth by Lanczos,
for random layers on random tokens and for the layers of language models, before and after training,
at their own inputs (behind LayerNorm). Training: the loss plus a weight times

    jasmin_0      mean log g_1(P_i) over rows but the first
    jasmin_10     mean log g_1(P_i)/g_10(P_i) over rows that see more than 11 tokens
    sensitivity   the query and key terms of the local bound ``fast`` (ours)

each averaged over ``num_penalised`` windows of the batch and summed over layers, for several
weights and seeds, compared at equal loss: along the weights of one regulariser (straight between
them), what is the smallest value reached while the validation loss is at most ``allowance`` nats
above that of the same seed without regulariser? The values: the local constant, and what Gaussian
noise on the embeddings, in units of their root mean square, adds to the loss.

The published maximum over rows is replaced by the mean and short prefixes are left out: under a
causal mask the first rows alone decide the maximum. The paper's own figures (weights, k, models,
tables) were not available to us: there is nothing to hold these numbers against but its theorems.
"""

# ruff: noqa: RUF009  # option() and section() return dataclass fields

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.assemble.model import build_model
from invformer.assemble.run import read_corpus
from invformer.assemble.saved_model import load_model, trained_configuration
from invformer.config.schema import MANY, CorpusName, ModelConfig
from invformer.config.section import option, section
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError, DataError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.nn.attention import DotProductAttention, L2Attention
from invformer.nn.branch import frozen_weights
from invformer.nn.position_bias import CausalMask, VisibilityMask
from invformer.nn.transformer import CharTransformer
from studies import jasmin
from studies.layer_bounds import Comparison, Layer, compare, heads_of, sensitivity
from studies.regularised_training import (
    attention_inputs,
    mean_nats,
    require_windows,
    train,
    validation_windows,
)
from studies.study import (
    Outcome,
    Rows,
    Study,
    StudyOptions,
    Summary,
    main,
    panels,
)
from studies.text import Text, TextConfig, read_text

if TYPE_CHECKING:
    from invformer.training.plots import Figure

Attention = Literal["dot_product", "l2", "contractive_l2"]
Inputs = Literal["gaussian", "clusters", "text"]
Regulariser = Literal["none", "jasmin_0", "jasmin_10", "sensitivity"]

SCALES = (0.1, 0.3, 0.6, 1.0, 1.5)  # of random tokens: from uniform to one-hot attention
NUM_CLUSTERS = 4
CLUSTER_SPREAD = 0.1  # of the tokens around their centre, relative to the centres
ROUNDING = 1e-9  # by how much a measured norm may exceed a bound before it counts


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Compare local bounds of attention layers, and regularisers of attention at equal loss."""

    program: ClassVar[str] = "-m studies.attention_distribution"
    paper: ClassVar[Mapping[str, Any]] = {
        "layer_sizes": [16, 64, 256],
        "d_model": 64,
        "seq_len": 64,
        "num_layers": 4,
        "num_steps": 2000,
        "weights": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
        "data.max_characters": None,
        "data.val_characters": 100_000,
    }
    layer_sizes: list[int] = option(
        [16, 64], "N of random layers on random tokens; [] for none", within="[2, 1e4]"
    )
    layer_width: int = option(64, "D of random layers, a multiple of num_heads", within="[1, 1e4]")
    attentions: list[Literal["dot_product", "l2"]] = option(
        ["dot_product", "l2"], "attention of the layers and of the models that are trained"
    )
    regularisers: list[Literal["jasmin_0", "jasmin_10", "sensitivity"]] = option(
        ["jasmin_0", "jasmin_10", "sensitivity"], "added to the loss; [] for none"
    )
    weights: list[float] = option(
        [0.003, 0.03, 0.3], "of each regulariser, besides 0", within="(0, 1e6]"
    )
    num_seeds: int = option(3, "seeds, from seed on", within="[1, 1e4]")
    allowance: float = option(
        0.05, "nats per character above the loss without regulariser", within="[0, 100]"
    )
    noise: float = option(
        0.3, "std of the noise on embeddings, in root mean squares of theirs", within="(0, 1e3]"
    )
    checkpoint: str | None = option(
        None, "run folder or file: its layers are compared too, on its own validation text"
    )
    num_sequences: int = option(4, "validation windows for local constants", within="[1, 1e5]")
    d_model: int = option(32, "width of the models, channels", within="[1, 1e4]")
    num_heads: int = option(4, "attention heads, a divisor of both widths", within="[1, 1e4]")
    num_layers: int = option(2, "blocks of the models", within="[1, 1e3]")
    seq_len: int = option(32, "context of the models, more than 11 characters", within="[12, 1e4]")
    batch_size: int = option(16, "windows per batch", within="[1, 1e6]")
    num_penalised: int = option(
        4, "windows of each batch that the regulariser is averaged over", within="[1, 1e6]"
    )
    num_steps: int = option(150, "optimiser steps", within=MANY)
    lr: float = option(5e-3, "learning rate of Adam, constant", within="(0, 10]")
    data: TextConfig = section(TextConfig)

    def check(self) -> None:
        """Heads divide the widths."""
        for name in ("d_model", "layer_width"):
            if getattr(self, name) % self.num_heads:
                self.refuse(
                    "num_heads",
                    f"{self.num_heads} heads do not divide {name}={getattr(self, name)}",
                )


@dataclass(frozen=True)
class Case:
    """A random layer, or a model and everything about its training."""

    attention: Attention
    inputs: Inputs
    causal: bool
    regulariser: Regulariser
    weight: float
    num_steps: int
    seq_len: int
    d_model: int
    num_heads: int
    num_layers: int
    batch_size: int
    num_penalised: int
    lr: float
    noise: float
    allowance: float
    num_sequences: int
    checkpoint: str | None
    corpus: CorpusName
    path: str | None
    max_characters: int | None
    val_characters: int
    sha256: str
    seed: int

    @property
    def group(self) -> str:
        """Which line of the comparison of bounds the case belongs to."""
        if self.checkpoint:
            return f"checkpoint {self.checkpoint}"
        if self.inputs != "text":
            return f"random layer, N={self.seq_len}"
        if self.num_steps == 0:
            return "model, untrained"
        return "model, trained" if self.regulariser == "none" else "model, regularised"


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        nats: validation nats per character; NaN for a random layer or after a non-finite loss.
        noisy_nats: the same with noise on the embeddings.
        one_hot: share of the rows (but the first) with one weight above 0.9.
        truth: ‖∂F/∂X‖ in frobenius by Lanczos, per attention layer and sequence.
        residual: the largest Lanczos residual.
        bounds: every upper bound at the same layers and sequences, by name.
    """

    nats: float
    noisy_nats: float
    one_hot: float
    truth: list[float]
    residual: float
    bounds: dict[str, list[float]]


def cases(options: Options) -> list[Case]:
    """Random layers, the models, and the checkpoint."""
    data = options.data
    text = read_text(data.name, data.path, data.max_characters, data.val_characters)
    if min(len(text.train), len(text.val)) <= options.seq_len:
        raise DataError(f"seq_len={options.seq_len}: the text has too few characters")
    require_windows(text, options.seq_len, options.num_sequences, "num_sequences")

    def case(attention: Attention, seed: int, **changed: Any) -> Case:
        values: dict[str, Any] = {
            "inputs": "text", "causal": True, "regulariser": "none", "weight": 0.0,
            "num_steps": options.num_steps, "seq_len": options.seq_len, "lr": options.lr,
            "d_model": options.d_model, "num_heads": options.num_heads,
            "num_layers": options.num_layers, "batch_size": options.batch_size,
            "num_penalised": options.num_penalised,
            "noise": options.noise, "allowance": options.allowance,
            "num_sequences": options.num_sequences, "checkpoint": None, "corpus": data.name,
            "path": data.path, "max_characters": data.max_characters,
            "val_characters": data.val_characters, "sha256": text.sha256,
        }  # fmt: skip
        return Case(attention=attention, seed=options.seed + seed, **(values | changed))

    found = [
        case(
            attention, seed, inputs=inputs, causal=causal, num_steps=0, num_layers=1, sha256="",
            seq_len=num_tokens, d_model=options.layer_width, num_sequences=len(SCALES),
        )
        for num_tokens in options.layer_sizes
        for attention in options.attentions
        for inputs in ("gaussian", "clusters")
        for causal in (False, True)
        for seed in range(options.num_seeds)
    ]  # fmt: skip
    for seed in range(options.num_seeds):
        for attention in options.attentions:
            found += [case(attention, seed, num_steps=0), case(attention, seed)]
            found += [
                case(attention, seed, regulariser=regulariser, weight=weight)
                for regulariser in options.regularisers
                for weight in sorted(options.weights)
            ]
    if options.checkpoint is not None:
        found.append(checkpoint_case(options, case))
    return found


def checkpoint_case(options: Options, case: Callable[..., Case]) -> Case:
    """The case of the model in ``checkpoint``, with the text and the training of its own run.

    Its hash and that of its text stand for the corpus's.
    """
    assert options.checkpoint is not None
    checkpoint = read_checkpoint(options.checkpoint)
    trained = trained_configuration(checkpoint)
    if trained.model.name == "contractive_bounded":
        raise ConfigurationError(
            f"checkpoint: {options.checkpoint} has attention in the unit ball, which is not "
            f"studied here; take one with {', '.join(get_args(Attention))}"
        )
    return case(
        trained.model.name, 0, checkpoint=options.checkpoint, num_steps=checkpoint.step,
        seq_len=trained.data.seq_len, d_model=trained.model.d_model,
        num_heads=trained.model.num_heads, num_layers=trained.model.num_layers,
        corpus=trained.data.name, path=trained.data.path,
        max_characters=trained.data.max_characters, batch_size=trained.data.batch_size,
        lr=trained.optim.lr,
        sha256=f"{checkpoint.sha256[:16]} {read_corpus(trained.data).sha256[:16]}",
    )  # fmt: skip


def measure(case: Case, device: torch.device) -> Result:
    """Build or train, then measure in float64."""
    if case.inputs != "text":
        return measure_layer(case, device)
    model, text = build(case, device)
    if model is None:
        return Result(math.nan, math.nan, math.nan, [], math.nan, {})
    model = model.double().eval()
    windows, targets = validation_windows(text, case.seq_len, device)
    generator = torch.Generator().manual_seed(case.seed)
    with frozen_weights(model), torch.no_grad():
        inputs = attention_inputs(model, windows[: case.num_sequences])
        parts = [compare(layer, z) for layer, z in inputs]
        nats = mean_nats(model, windows, targets)
        noisy_nats = mean_nats(model, windows, targets, case.noise, generator)
    return joined(parts, nats, noisy_nats)


def joined(parts: Sequence[Comparison], nats: float, noisy_nats: float) -> Result:
    """The comparisons of all layers as one result."""
    return Result(
        nats=nats,
        noisy_nats=noisy_nats,
        one_hot=statistics.fmean(part.one_hot for part in parts),
        truth=[value for part in parts for value in part.truth],
        residual=max(part.residual for part in parts),
        bounds={
            name: [value for part in parts for value in part.bounds[name]]
            for name in parts[0].bounds
        },
    )


def build(case: Case, device: torch.device) -> tuple[CharTransformer | None, Text]:
    """The case's model with its text; None in place of a model after a non-finite loss."""
    if case.checkpoint is not None:
        checkpoint = read_checkpoint(case.checkpoint)
        trained = trained_configuration(checkpoint)
        vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
        corpus = read_corpus(trained.data)
        val = vocabulary.encode(corpus.split("val")[: case.val_characters])
        text = Text(vocabulary.encode(corpus.train), val, vocabulary.size, corpus.sha256[:16])
        return load_model(checkpoint, trained, vocabulary).to(device), text
    text = read_text(case.corpus, case.path, case.max_characters, case.val_characters)
    torch.manual_seed(case.seed)
    config = ModelConfig(
        name=case.attention, certificate=None, d_model=case.d_model, num_heads=case.num_heads,
        num_layers=case.num_layers,
    )  # fmt: skip
    model = build_model(config, text.vocab_size, case.seq_len).float().to(device)
    finite = train(
        model, text, num_steps=case.num_steps, batch_size=case.batch_size, lr=case.lr,
        seed=case.seed, penalty=penalty_of(case),
    )  # fmt: skip
    return (model if finite else None), text


def penalty_of(case: Case) -> Callable[[Layer, Tensor], Tensor] | None:
    """weight × regulariser of one attention layer at its input."""
    match case.regulariser:
        case "none":
            return None
        case "sensitivity":
            return lambda layer, z: case.weight * sensitivity(layer, z[: case.num_penalised])
        case "jasmin_0" | "jasmin_10":
            k = int(case.regulariser.removeprefix("jasmin_"))

            def penalty(layer: Layer, z: Tensor) -> Tensor:
                p = heads_of(layer, z[: case.num_penalised]).p
                return case.weight * jasmin.jasmin_regulariser(p, k)

            return penalty


# --- random layers --------------------------------------------------------------------------------


def measure_layer(case: Case, device: torch.device) -> Result:
    """A random layer on random tokens of several scales."""
    torch.manual_seed(case.seed)
    n = case.seq_len
    position = CausalMask(n) if case.causal else VisibilityMask(torch.ones(n, n, dtype=torch.bool))
    kind = L2Attention if case.attention == "l2" else DotProductAttention
    layer = kind(case.d_model, case.num_heads, position).double().to(device)
    with torch.no_grad():
        return joined([compare(layer, random_tokens(case).to(device))], math.nan, math.nan)


def random_tokens(case: Case) -> Float[Tensor, "scales tokens width"]:
    """Gaussian tokens, or tokens close to four Gaussian centres, once per scale."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (len(SCALES), case.seq_len, case.d_model)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.inputs == "clusters":
        centre = torch.randint(NUM_CLUSTERS, shape[:2], generator=generator)
        centres = torch.randn(
            len(SCALES), NUM_CLUSTERS, case.d_model, generator=generator, dtype=torch.float64
        )
        x = centres.take_along_dim(centre[..., None], dim=1) + CLUSTER_SPREAD * x
    return torch.tensor(SCALES, dtype=torch.float64)[:, None, None] * x


# --- what it says --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tightness:
    """bound/truth over many layers and sequences.

    Attributes:
        low: the smallest ratio.
        mean: the mean.
        high: the largest.
        violations: how often the truth exceeded the bound.
        count: how many were compared.
    """

    low: float
    mean: float
    high: float
    violations: int
    count: int

    def __str__(self) -> str:
        return f"{self.low:.2f}/{self.mean:.4g}/{self.high:.4g}"


def tightness_by_group(rows: Rows[Case, Result]) -> dict[tuple[str, str], dict[str, Tightness]]:
    """bound/truth of every bound, per attention and group of cases."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
    for case, result in rows:
        group = ratios.setdefault((case.attention, case.group), {})
        for name, values in result.bounds.items():
            pairs = zip(values, result.truth, strict=True)
            group.setdefault(name, []).extend(bound / truth for bound, truth in pairs)
    return {
        key: {
            name: Tightness(
                min(values), statistics.fmean(values), max(values),
                sum(not value >= 1 - ROUNDING for value in values), len(values),
            )
            for name, values in group.items()
        }
        for key, group in ratios.items()
    }  # fmt: skip


def disorder(rows: Rows[Case, Result]) -> int:
    """How often ``tight`` exceeds ``comparison``, or ``g1_centred`` exceeds ``g1``: never."""
    count = 0
    for _, result in rows:
        for low, high in (("tight", "comparison"), ("g1_centred", "g1")):
            if low not in result.bounds:
                continue
            pairs = zip(result.bounds[low], result.bounds[high], strict=True)
            count += sum(a > b * (1 + ROUNDING) for a, b in pairs)
    return count


def constant_of(result: Result) -> float:
    """The geometric mean of the true local constants over layers and sequences."""
    return statistics.geometric_mean(result.truth) if result.truth else math.nan


def damage(result: Result) -> float:
    """What noise on the embeddings costs, nats per character."""
    return result.noisy_nats - result.nats


def at_equal_loss(path: Sequence[tuple[float, float]], allowance: float) -> float:
    """The smallest value on a path of (nats, value) while nats ≤ its first nats + allowance.

    The path leads through the weights of one regulariser from zero up, straight between them, and
    ends where it first leaves the allowed loss.
    """
    limit = path[0][0] + allowance
    best = path[0][1]
    for (nats, value), (next_nats, next_value) in pairwise(path):
        if not math.isfinite(next_nats):
            break
        if next_nats > limit:
            share = (limit - nats) / (next_nats - nats)
            best = min(best, value + share * (next_value - value))
            break
        best = min(best, next_value)
    return best


@dataclass(frozen=True)
class Equal:
    """What one regulariser reached at equal loss, relative to no regulariser, seed by seed.

    Attributes:
        constants: local constant over that without regulariser.
        damages: cost of embedding noise over that without regulariser; NaN where noise cost
            nothing without one.
    """

    constants: list[float]
    damages: list[float]


def equal_loss(rows: Rows[Case, Result]) -> dict[tuple[str, str], Equal]:
    """Every regulariser at equal loss, per attention."""
    models = [(c, r) for c, r in rows if c.inputs == "text" and c.num_steps and not c.checkpoint]
    found: dict[tuple[str, str], Equal] = {}
    for case, plain in models:
        if case.regulariser != "none" or not plain.truth:
            continue
        same = [(c, r) for c, r in models if c.attention == case.attention and c.seed == case.seed]
        for name in dict.fromkeys(c.regulariser for c, _ in same if c.regulariser != "none"):
            chosen = sorted(((c.weight, r) for c, r in same if c.regulariser == name), key=first)
            results = [plain, *(r for _, r in chosen)]
            equal = found.setdefault((case.attention, name), Equal([], []))
            logs = [(r.nats, math.log(constant_of(r))) for r in results if r.truth]
            equal.constants.append(math.exp(at_equal_loss(logs, case.allowance) - logs[0][1]))
            damages = [(r.nats, damage(r)) for r in results]
            without = damage(plain)
            ratio = at_equal_loss(damages, case.allowance) / without if without > 0 else math.nan
            equal.damages.append(ratio)
    return found


def first(pair: tuple[float, Any]) -> float:
    """The first of a pair, for sorting."""
    return pair[0]


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Bounds first, then every training."""
    groups = tightness_by_group(rows)
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    table: list[dict[str, Any]] = [
        blank_line(attention, where, names)
        | {name: str(found) for name, found in group.items()}
        | {
            "compared": max(t.count for t in group.values()),
            "violations": sum(t.violations for t in group.values()),
        }
        for (attention, where), group in groups.items()
        if group
    ]
    table += [training_line(lines, names) for lines in by_training(rows)]
    equal = equal_loss(rows)
    violations = sum(t.violations for group in groups.values() for t in group.values())
    wrong_order = disorder(rows)
    paper = (
        "Theorem 3: ‖J‖ ≤ ‖W^V‖(‖P‖ + 2‖X‖²‖A‖ max_i g₁(P_i)) holds; JaSMin is said to lower the "
        "local constant (its tables were not available to us)"
    )
    compared = sum(max((t.count for t in group.values()), default=0) for group in groups.values())
    allowance = rows[0][0].allowance
    ours = (
        f"{violations} violations in {compared} comparisons; mean bound/truth: {means(rows)}; "
        f"order of these means on random layers: {order_of_means(rows)}; "
        f"at ≤ {allowance:g} nats more, local constant (and cost of noise) relative to no "
        f"regulariser, mean of seeds: {equal_in_words(equal) or 'not run'}"
    )
    outcome, why = verdict(violations, wrong_order, equal)
    return Summary(table, paper, ours, outcome, why)


def blank_line(attention: str, where: str, names: Sequence[str]) -> dict[str, Any]:
    """A line of the table with nothing measured yet."""
    measured = ("compared", "violations", "val nats", "noisy nats", "constant", "one-hot rows")
    empty = dict.fromkeys([*names, *measured])
    return {"attention": attention, "where": where, "paper": None, **empty}


def by_training(rows: Rows[Case, Result]) -> list[list[tuple[Case, Result]]]:
    """The seeds of every training together."""
    found: dict[tuple[str, str, float], list[tuple[Case, Result]]] = {}
    for case, result in rows:
        if case.inputs == "text" and case.num_steps and not case.checkpoint:
            key = (case.attention, case.regulariser, case.weight)
            found.setdefault(key, []).append((case, result))
    return list(found.values())


def training_line(lines: Rows[Case, Result], names: Sequence[str]) -> dict[str, Any]:
    """One training, mean over its seeds."""
    case, results = lines[0][0], [result for _, result in lines]
    where = f"{case.regulariser} × {case.weight:g}" if case.weight else "no regulariser"
    return blank_line(case.attention, where, names) | {
        "val nats": statistics.fmean(r.nats for r in results),
        "noisy nats": statistics.fmean(r.noisy_nats for r in results),
        "constant": statistics.fmean(map(constant_of, results)),
        "one-hot rows": statistics.fmean(r.one_hot for r in results),
    }


def ratios_by_attention(rows: Rows[Case, Result]) -> dict[str, dict[str, float]]:
    """Mean bound/truth of every bound over some cases, per attention."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for case, result in rows:
        for name, values in result.bounds.items():
            pairs = zip(values, result.truth, strict=True)
            found = ratios.setdefault(case.attention, {}).setdefault(name, [])
            found.extend(bound / truth for bound, truth in pairs)
    return {
        attention: {name: statistics.fmean(values) for name, values in group.items()}
        for attention, group in ratios.items()
    }


def means(rows: Rows[Case, Result]) -> str:
    """Mean bound/truth of every bound over all cases, in words."""
    return "; ".join(
        f"{attention} " + ", ".join(f"{name} {mean:.3g}" for name, mean in group.items())
        for attention, group in ratios_by_attention(rows).items()
    )


def order_of_means(rows: Rows[Case, Result]) -> str:
    """The bounds on random layers, the closest first."""
    layers = ratios_by_attention([(c, r) for c, r in rows if c.inputs != "text"])
    orders = (
        f"{attention} {' < '.join(sorted(group, key=group.__getitem__))}"
        for attention, group in layers.items()
    )
    return "; ".join(orders) or "not run"


def equal_in_words(equal: Mapping[tuple[str, str], Equal]) -> str:
    """Every regulariser at equal loss: mean over seeds and range of the constant, and the noise."""
    return "; ".join(
        f"{attention} {name} {statistics.fmean(e.constants):.2f} "
        f"[{min(e.constants):.2f}, {max(e.constants):.2f}] ({mean_or_dash(e.damages)})"
        for (attention, name), e in equal.items()
    )


def mean_or_dash(values: Sequence[float]) -> str:
    """The mean in two digits; a dash where one of the values does not exist."""
    mean = statistics.fmean(values)
    return "–" if math.isnan(mean) else f"{mean:.2f}"


def verdict(
    violations: int, wrong_order: int, equal: Mapping[tuple[str, str], Equal]
) -> tuple[Outcome, str]:
    """Whether the theorem held, and who lowers the constant most at equal loss."""
    if violations or wrong_order:
        why = f"{violations} bounds lie below the truth and {wrong_order} out of order: a bug"
        return "not reproduced", why
    best = []
    for attention in dict.fromkeys(attention for attention, _ in equal):
        mean = {
            name: statistics.fmean(e.constants) for (a, name), e in equal.items() if a == attention
        }
        name = min(mean, key=mean.__getitem__)
        best.append(f"{name} lowers it most with {attention} (to {mean[name]:.2f} of it)")
    jasmin_helps = [
        key for key, e in equal.items() if key[1].startswith("jasmin") and max(e.constants) < 1
    ]
    why = (
        "the theorem is never violated and its bound is loose; whether JaSMin improves robustness "
        "as published could not be compared, its tables were not available. "
    )
    if best:
        helped = ", ".join(f"{name} with {attention}" for attention, name in jasmin_helps)
        why += (
            f"Local constants at equal loss: {'; '.join(best)}; JaSMin lowers them in every seed: "
        )
        why += helped or "nowhere"
    return "partly reproduced", why


GREYS: dict[str, tuple[str, str, str]] = {  # colour, marker, line
    "none": ("k", "*", ""),
    "jasmin_0": ("0.55", "s", ":"),
    "jasmin_10": ("0.35", "^", "--"),
    "sensitivity": ("0.0", "o", "-"),
}


def draw(rows: Rows[Case, Result]) -> "Figure":
    """Bounds over truth on the left; local constants and noise against loss on the right."""
    attentions = list(dict.fromkeys(case.attention for case, _ in rows))
    figure, axes = panels(len(attentions), 3)
    for index, attention in enumerate(attentions):
        chosen = [(case, result) for case, result in rows if case.attention == attention]
        draw_bounds(axes[3 * index], chosen, attention)
        draw_trade(axes[3 * index + 1], chosen, constant_of, "local constant, frobenius (no unit)")
        draw_trade(axes[3 * index + 2], chosen, damage, "cost of embedding noise, nats/character")
    return figure


def draw_bounds(axes: Any, rows: Rows[Case, Result], attention: str) -> None:
    """Every bound against the truth, one mark per layer and sequence."""
    names = list(dict.fromkeys(name for _, result in rows for name in result.bounds))
    truths = [value for _, result in rows for value in result.truth]
    for index, name in enumerate(names):
        pairs = [
            pair
            for _, result in rows
            if name in result.bounds
            for pair in zip(result.truth, result.bounds[name], strict=True)
        ]
        x, y = zip(*pairs, strict=True)
        grey = str(0.75 * index / max(1, len(names) - 1))
        axes.plot(x, y, "ov^sDP"[index % 6], color=grey, markersize=3, fillstyle="none", label=name)
    ends = [min(truths), max(truths)] if truths else []
    axes.plot(ends, ends, "k-", linewidth=1, label="bound = truth")
    axes.set(
        xlabel="true ‖∂F/∂X‖, frobenius (no unit)", ylabel="upper bound (no unit)",
        xscale="log", yscale="log", title=f"{attention}: bounds on attention layers",
    )  # fmt: skip
    axes.legend(fontsize="small")


def draw_trade(
    axes: Any, rows: Rows[Case, Result], value: Callable[[Result], float], label: str
) -> None:
    """A value against validation loss, through the weights of every regulariser, mean of seeds."""
    trainings = {
        (c[0][0].regulariser, c[0][0].weight): [r for _, r in c] for c in by_training(rows)
    }
    for name in get_args(Regulariser):
        weights = sorted(weight for n, weight in trainings if n == name)
        starts = [trainings["none", 0.0]] if ("none", 0.0) in trainings and name != "none" else []
        groups = starts + [trainings[name, weight] for weight in weights]
        if not weights:
            continue
        color, marker, line = GREYS[name]
        axes.plot(
            [statistics.fmean(r.nats for r in group) for group in groups],
            [statistics.fmean(map(value, group)) for group in groups],
            color=color, marker=marker, linestyle=line or "none", label=name, fillstyle="none",
        )  # fmt: skip
    attention = rows[0][0].attention
    axes.set(xlabel="validation nats per character", ylabel=label, title=f"{attention}, trained")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
