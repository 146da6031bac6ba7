"""Kim et al. 2021, Fig. 2: which residual attention maps fixed-point iteration inverts.

g(x) = x + s F(x) is undone by x ← g(x*) − s F(x) from x₀ = g(x*), in float64, and the largest entry
of |x − x*| over a batch is recorded after every step. Inputs are the paper's: one token zero, all
others uniform on [−r, r]; that is where dot product's Jacobian is large, and **r decides the
outcome**: the paper does not state it, so two are shown. No mask; Glorot-uniform weights.

    dot_product       s = c
    l2                s = c, tied L2 attention, not normalised
    contractive_kim   s = c / (Theorem 3.2's bound in entry_max), as published
    contractive       s = c / (our bound in token_max)

Trained weights: ``train_steps`` trains one-layer language models here (causal, no position bias);
``checkpoint=RUN`` takes the attention of a run's block instead. The same rows hold the paper's
output-variance experiment: the spread of F(X) beside that of X.

``scale=paper``: N and D in 32, 64, 128 and a batch of 128.
"""

# ruff: noqa: RUF009  # option() returns a dataclass field

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.assemble.saved_model import load_model, trained_configuration
from invformer.bounds import contractive, kim
from invformer.config import load_config
from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.nn.attention import DotProductAttention, L2Attention
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.residual import InvertibleBlock
from invformer.nn.transformer import CharTransformer, PreNormBlock
from studies import depth_stability
from studies.study import (
    Outcome,
    Rows,
    Study,
    StudyOptions,
    Summary,
    main,
    panels,
    progress,
)
from studies.text import read_text

if TYPE_CHECKING:
    from invformer.training.plots import Figure

Map = Literal["dot_product", "l2", "contractive_kim", "contractive", "checkpoint"]
Weights = Literal["random", "trained", "checkpoint"]

MAPS: tuple[Map, ...] = get_args(Map)[:4]
LINES: dict[Map, str] = dict(zip(get_args(Map), ("-", "--", ":", "-.", "-"), strict=True))
MARKERS: dict[Map, str] = dict(zip(get_args(Map), "os^Dv", strict=True))
MUCH_WIDER = 2.0  # how many times, to count as the paper's output-variance result
REACHED = 1e-12  # the error at which a float64 inverse counts as found


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Invert residual attention maps by fixed-point iteration."""

    program: ClassVar[str] = "-m studies.invertibility"
    paper: ClassVar[Mapping[str, Any]] = {
        "tokens": [32, 64, 128],
        "widths": [32, 64, 128],
        "batch_size": 128,
    }
    scales: list[float] = option([0.5, 0.7, 0.9], "c", within="(0, 1)")
    ranges: list[float] = option([1.0, 10.0], "r, inputs are uniform on [-r, r]", within="(0, 1e6]")
    tokens: list[int] = option([64], "N, tokens", within="[2, 1e4]")
    widths: list[int] = option([64], "D, channels, each with each N", within="[1, 1e4]")
    num_heads: int = option(8, "heads, a divisor of every width", within="[1, 1e4]")
    batch_size: int = option(16, "inputs; the worst counts", within="[1, 1e5]")
    num_steps: int = option(200, "steps of the iteration", within=MANY)
    train_steps: int = option(
        200,
        "Adam steps of the one-layer models with trained weights; 0 for none",
        within="[0, 1e6]",
    )
    checkpoint: str | None = option(None, "run folder or file whose attention is inverted too")
    block: int = option(0, "block of the checkpoint", within="[0, 1e4]")

    def check(self) -> None:
        """Heads divide every width."""
        for width in self.widths:
            if width % self.num_heads:
                self.refuse("num_heads", f"{self.num_heads} heads do not divide the width {width}")


@dataclass(frozen=True)
class Case:
    """One map on one batch of inputs; a checkpoint knows its heads, and ``digest`` its content.

    ``sha256`` is that of the text that trained weights have read.
    """

    map: Map
    weights: Weights
    scale: float
    reach: float
    num_tokens: int
    d_model: int
    num_heads: int
    batch_size: int
    num_steps: int
    train_steps: int
    sha256: str
    checkpoint: str
    digest: str
    block: int
    seed: int


@dataclass(frozen=True)
class Result:
    """How the inversion went, and how wide F spreads its outputs.

    Attributes:
        errors: largest |x − x*| over the batch before the first step and after every one.
        first_step: the first step with an error of at most 1e-12; −1 if there is none.
        input_std: standard deviation of the entries of X.
        output_std: the same of F(X), without the factor s.
        input_max: largest |entry| of X.
        output_max: the same of F(X).
    """

    errors: list[float]
    first_step: int
    input_std: float
    output_std: float
    input_max: float
    output_max: float

    @property
    def inverted(self) -> bool:
        """Whether the iteration arrived and stayed."""
        return self.errors[-1] <= REACHED


@dataclass(frozen=True)
class Attention:
    """F in float64, and the factor that makes it a contraction by the map's theorem (1 if none)."""

    f: Callable[[Tensor], Tensor]
    factor: float


def cases(options: Options) -> list[Case]:
    """Random weights in every size, trained ones in the first, the checkpoint's in its own."""
    sizes = list(itertools.product(options.tokens, options.widths))
    first = Case(
        map="l2", weights="random", scale=0.5, reach=1.0,
        num_tokens=sizes[0][0], d_model=sizes[0][1], num_heads=options.num_heads,
        batch_size=options.batch_size, num_steps=options.num_steps, train_steps=0,
        sha256="", checkpoint="", digest="", block=0, seed=options.seed,
    )  # fmt: skip
    models = [
        replace(first, map=map, num_tokens=num_tokens, d_model=d_model)
        for (num_tokens, d_model), map in itertools.product(sizes, MAPS)
    ]
    if options.train_steps:
        trained = replace(
            first,
            weights="trained",
            train_steps=options.train_steps,
            sha256=digest_of_training_text(),
        )
        models += [replace(trained, map="dot_product"), replace(trained, map="l2")]
    if options.checkpoint is not None:
        models.append(checkpoint_case(first, options.checkpoint, options.block))
    inputs = list(itertools.product(options.ranges, options.scales))
    return [
        replace(model, reach=reach, scale=scale)
        for model, (reach, scale) in itertools.product(models, inputs)
    ]


def checkpoint_case(case: Case, path: str, block: int) -> Case:
    """The case for one block of a run, in the run's own size."""
    digest, model = digest_of(path), load_checkpoint(path)
    if block >= len(model.stack.blocks):
        raise ConfigurationError(
            f"block: {block} is not below the {len(model.stack.blocks)} of {path}"
        )
    return replace(
        case, map="checkpoint", weights="checkpoint", num_tokens=model.seq_len,
        d_model=model.head.in_features, num_heads=0, checkpoint=path, digest=digest, block=block,
    )  # fmt: skip


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Invert g on the batch and look at F's outputs."""
    attention = build_attention(case, device)
    x = inputs_of(case).to(device)
    scale = case.scale * attention.factor
    output = attention.f(x)
    errors = reconstruction_errors(lambda x: scale * attention.f(x), x, case.num_steps)
    first = next((step for step, error in enumerate(errors) if error <= REACHED), -1)
    return Result(
        errors, first, x.std().item(), output.std().item(), x.abs().max().item(),
        output.abs().max().item(),
    )  # fmt: skip


def reconstruction_errors(
    f: Callable[[Tensor], Tensor], x: Float[Tensor, "batch tokens width"], num_steps: int
) -> list[float]:
    """max |x_k − x| of x_{k+1} = y − f(x_k), y = x + f(x), x_0 = y, for k = 0 … num_steps."""
    y = x + f(x)
    guess = y
    errors = [(guess - x).abs().max().item()]
    for _ in progress(range(num_steps), "fixed-point iteration"):
        guess = y - f(guess)
        errors.append((guess - x).abs().max().item())
    return errors


def inputs_of(case: Case) -> Float[Tensor, "batch tokens width"]:
    """Uniform on [−r, r], the last token zero: under a causal mask it is the one that sees all."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch_size, case.num_tokens, case.d_model)
    x = case.reach * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    x[:, -1] = 0
    return x


def build_attention(case: Case, device: torch.device) -> Attention:
    """The map F of a case, with its factor."""
    match case.weights:
        case "random":
            return random_attention(case, device)
        case "trained":
            module = trained_attention(
                case.map, case.num_tokens, case.d_model, case.num_heads, case.train_steps, case.seed
            )
            return Attention(module.to(device), 1.0)
        case "checkpoint":
            return Attention(
                attention_of(load_checkpoint(case.checkpoint), case.block).to(device), 1.0
            )


def random_attention(case: Case, device: torch.device) -> Attention:
    """Glorot-uniform weights, every token sees every token."""
    everyone = torch.ones(case.num_tokens, case.num_tokens, dtype=torch.bool)
    kind = DotProductAttention if case.map == "dot_product" else L2Attention
    module = kind(case.d_model, case.num_heads, VisibilityMask(everyone)).double()
    generator = torch.Generator().manual_seed(case.seed + 1)
    limit = math.sqrt(3 / case.d_model)  # Glorot for a D × D matrix; heads are slices of one
    for weight in module.parameters():
        nn.init.uniform_(weight, -limit, limit, generator=generator)
    factor = 1.0
    if isinstance(module, L2Attention) and case.map != "l2":
        bound = entry_max_bound if case.map == "contractive_kim" else token_max_bound
        factor = 1 / bound(module, case.num_tokens)
    return Attention(module.to(device), factor)


def entry_max_bound(module: L2Attention, num_tokens: int) -> float:
    """Theorem 3.2's bound, in the form the paper prints."""
    w_o = module.w_o.flatten(0, 1)
    return kim.entry_max_bound(module.w_q, module.w_v, w_o, num_tokens)


def token_max_bound(module: L2Attention, num_tokens: int) -> float:
    """Our bound in token_max."""
    return contractive.token_max_bound(*module.effective_weights(), num_tokens)


def digest_of_training_text() -> str:
    """The beginning of the SHA-256 of the text that :func:`trained_attention` trains on."""
    data = depth_stability.Options().data
    return read_text(data.name, data.path, data.max_characters, data.val_characters).sha256


@lru_cache(maxsize=4)
@torch.enable_grad()
def trained_attention(
    map: Map, num_tokens: int, d_model: int, num_heads: int, train_steps: int, seed: int
) -> nn.Module:
    """The attention of a one-layer language model after some training, in float64."""
    settings = [
        f"kinds=[{map}]", "depths=[1]", f"d_model={d_model}", f"num_heads={num_heads}",
        f"seq_len={num_tokens}", f"num_steps={train_steps}", f"seed={seed}", "lr=2e-3",
        "position_bias=false",
    ]  # fmt: skip
    (case,) = depth_stability.cases(load_config(settings, depth_stability.Options))
    model, _ = depth_stability.train(case, torch.device("cpu"))
    return attention_of(model, 0).double()


@lru_cache(maxsize=1)
def load_checkpoint(path: str) -> CharTransformer:
    """The language model of a run, in float64."""
    checkpoint = read_checkpoint(path)
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    return load_model(checkpoint, trained_configuration(checkpoint), vocabulary).double()


def attention_of(model: CharTransformer, index: int) -> nn.Module:
    """The attention of one block: a contractive one keeps the constant it was built with."""
    block = model.stack.blocks[index]
    if isinstance(block, InvertibleBlock):
        return block.attention.branch
    assert isinstance(block, PreNormBlock)
    return block.attention.inner


def digest_of(path: str) -> str:
    """The beginning of a checkpoint's SHA-256."""
    return read_checkpoint(path).sha256[:16]


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every case on one line; the verdict is about random weights, as in the paper's figure."""
    table = [
        {
            "map": case.map,
            "weights": case.weights,
            "range": f"±{case.reach:g}",
            "c": case.scale,
            "N": case.num_tokens,
            "D": case.d_model,
            "error @10": error_at(result, 10),
            "error @20": error_at(result, 20),
            f"error @{case.num_steps}": result.errors[-1],
            "first step ≤ 1e-12": None if result.first_step < 0 else result.first_step,
            "std F(X)/std X": result.output_std / result.input_std,
            "max F(X)/max X": result.output_max / result.input_max,
        }
        for case, result in rows
    ]
    random = [(case, result) for case, result in rows if case.weights == "random"]
    settings: dict[tuple[Map, float], None] = {(case.map, case.reach): None for case, _ in random}
    ours = "; ".join(
        f"{map} on ±{reach:g}: {inverted_scales(rows_of(random, map, reach))}"
        for map, reach in settings
    )
    paper = (
        "dot product is not inverted, L2 is for small enough c (c in 0.5, 0.7, 0.9; a figure "
        "without numbers, input range not stated); the outputs of trained dot product spread much "
        "wider than those of L2"
    )
    return Summary(table, paper, ours, *verdict(random, rows))


def error_at(result: Result, step: int) -> float | None:
    """The error after a step, if there were so many."""
    return result.errors[step] if step < len(result.errors) else None


def rows_of(rows: Rows[Case, Result], map: Map, reach: float) -> list[tuple[Case, Result]]:
    """The rows of one map on one input range."""
    return [(c, r) for c, r in rows if c.map == map and c.reach == reach]


def inverted_scales(rows: Rows[Case, Result]) -> str:
    """The c at which every case was inverted, in words."""
    scales = sorted({case.scale for case, _ in rows})
    good = [c for c in scales if all(r.inverted for case, r in rows if case.scale == c)]
    if len(good) == len(scales):
        return "inverted for every c"
    return f"inverted for c = {', '.join(map(str, good))}" if good else "never inverted"


def verdict(random: Rows[Case, Result], rows: Rows[Case, Result]) -> tuple[Outcome, str]:
    """Whether dot product fails and L2 does not, and on which range."""
    ranges = sorted({case.reach for case, _ in random})
    fails = [r for r in ranges if not any(x.inverted for _, x in rows_of(random, "dot_product", r))]
    partly = [
        f"on ±{r:g} dot product is {inverted_scales(rows_of(random, 'dot_product', r))}"
        for r in ranges
        if r not in fails
    ]
    holds = all(r.inverted for c, r in random if c.map != "dot_product")
    outputs = output_spread([(c, r) for c, r in rows if c.weights == "trained"])
    if not holds:
        worst = max(r.errors[-1] for c, r in random if c.map != "dot_product")
        return "not reproduced", f"an L2 map was not inverted (error {worst:.1e}){outputs}"
    if not fails:
        return "not reproduced", f"dot product was inverted too: {'; '.join(partly)}{outputs}"
    failing = ", ".join(f"±{r:g}" for r in fails)
    why = f"dot product never converges on {failing} and every L2 map reaches 1e-12; "
    why += f"the range decides: {'; '.join(partly)}" if partly else "no other range was tried"
    return "reproduced", why + outputs


def output_spread(trained: Rows[Case, Result]) -> str:
    """What the trained weights say about the paper's output-variance experiment, as a clause."""
    widest = max((case.reach for case, _ in trained), default=0.0)
    spread = {c.map: r.output_std / r.input_std for c, r in trained if c.reach == widest}
    if len(spread) < 2:
        return ""
    ratio = spread["dot_product"] / spread["l2"]
    seen = "as in the paper" if ratio >= MUCH_WIDER else "not the paper's much wider spread"
    return (
        f"; with trained weights on ±{widest:g} dot product spreads its outputs {ratio:.2f} times "
        f"as wide as L2, {seen}"
    )


def draw(rows: Rows[Case, Result]) -> "Figure":
    """Error against step, a panel per range and origin of the weights, in the first size."""
    first = rows[0][0]
    shown = [
        (case, result)
        for case, result in rows
        if case.weights != "random"
        or (case.num_tokens, case.d_model) == (first.num_tokens, first.d_model)
    ]
    settings = list(dict.fromkeys((case.weights, case.reach) for case, _ in shown))
    figure, axes = panels(math.ceil(len(settings) / 2), min(2, len(settings)))
    scales = sorted({case.scale for case, _ in rows})
    for one, (weights, reach) in zip(axes, settings, strict=False):
        for case, result in shown:
            if (case.weights, case.reach) != (weights, reach):
                continue
            grey = 0.7 * (1 - scales.index(case.scale) / max(1, len(scales) - 1))
            floored = [max(error, 1e-17) for error in result.errors]  # a logarithm wants no zero
            one.plot(
                floored, LINES[case.map], color=str(grey), marker=MARKERS[case.map], markersize=4,
                markevery=max(1, case.num_steps // 10), label=f"{case.map}, c = {case.scale:g}",
            )  # fmt: skip
        one.set(
            xlabel="fixed-point step", ylabel="largest |x − x*| over the batch (units of X)",
            yscale="log", title=f"{weights} weights, inputs on ±{reach:g}",
        )  # fmt: skip
        one.legend(fontsize="x-small", ncols=2)
    for one in axes[len(settings) :]:
        one.set_visible(False)
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
