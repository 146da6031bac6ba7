"""Kim et al. 2021, Fig. 2: which residual attention maps fixed-point iteration inverts.

g(x) = x + s F(x) is undone by x ← g(x*) − s F(x) from x₀ = g(x*), in float64, and the largest entry
of |x − x*| over a batch is recorded after every step. Inputs are the paper's: one token zero, all
others uniform on [−r, r]; that is where dot product's Jacobian is large, and **r decides the
outcome**: the paper does not state it, so two are shown. No mask; Glorot-uniform weights.

    dot_product       s = c
    l2                s = c, tied L2 attention, not normalised
    contractive_kim   s = c / (Theorem 3.2's bound in entry_max), as published
    contractive       s = c / (our bound in token_max)

Trained weights are those of one-layer language models that are trained here (causal, no position
bias). The same rows hold the output-variance experiment: the spread of F(X) beside that of X.

Reproduced means that on some range dot product is never inverted to 1e-12, at no c and in no size,
while every L2 map is on every range.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.bounds import contractive
from invformer.config import load_config
from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.kim_attention import L2Attention
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.transformer import PreNormBlock
from studies import depth_stability, kim
from studies.report import Figure, Outcome, Rows, Summary, by, look_of, panels, table, values
from studies.study import Study, StudyOptions, case_of, program, progress
from studies.training import train_by_adam

Map = Literal["dot_product", "l2", "contractive_kim", "contractive"]
Weights = Literal["random", "trained"]

MAPS: tuple[Map, ...] = get_args(Map)
MUCH_WIDER = 2.0  # how many times, to count as the paper's output-variance result
REACHED = 1e-12  # the error at which a float64 inverse counts as found


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Invert residual attention maps by fixed-point iteration."""

    scales: list[float] = option([0.5, 0.7, 0.9], "c", "(0, 1)")
    ranges: list[float] = option([1.0, 10.0], "r, inputs are uniform on [-r, r]", "(0, 1e6]")
    tokens: list[int] = option([64], "N, tokens", "[2, 1e4]")
    widths: list[int] = option([64], "D, channels, each with each N", "[1, 1e4]")
    num_heads: int = option(8, "heads, a divisor of every width", "[1, 1e4]")
    batch_size: int = option(16, "inputs; the worst counts", "[1, 1e5]")
    num_steps: int = option(200, "steps of the iteration", MANY)
    train_steps: int = option(
        200,
        "Adam steps of the one-layer models with trained weights; 0 for none",
        within="[0, 1e6]",
    )

    def check(self) -> None:
        """Heads divide every width."""
        for width in self.widths:
            if width % self.num_heads:
                self.refuse("num_heads", f"{self.num_heads} heads do not divide the width {width}")


@dataclass(frozen=True)
class Case:
    """One map on one batch of inputs; ``sha256`` is that of the text that trained weights read."""

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
    seed: int


@dataclass(frozen=True)
class Result:
    """How the inversion went, and how wide F spreads its outputs."""

    errors: list[float]  # largest |x − x*| over the batch before the first step and after every one
    input_std: float  # of the entries of X
    output_std: float  # of the entries of F(X), without the factor s

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
    """Random weights in every size, trained ones in the first, each at every range and c."""
    sizes = list(itertools.product(options.tokens, options.widths))
    models: list[tuple[Weights, Map, tuple[int, int]]] = [
        ("random", map, size) for size, map in itertools.product(sizes, MAPS)
    ]
    text = ""
    if options.train_steps:
        text = depth_stability.cases(training_options("l2", 2, 1, 1, 1, 0))[0].sha256
        models.append(("trained", "dot_product", sizes[0]))
        models.append(("trained", "l2", sizes[0]))
    return [
        case_of(
            Case, options, map=map, weights=weights, scale=scale, reach=reach,
            num_tokens=size[0], d_model=size[1],
            train_steps=options.train_steps if weights == "trained" else 0,
            sha256=text if weights == "trained" else "",
        )
        for weights, map, size in models
        for reach, scale in itertools.product(options.ranges, options.scales)
    ]  # fmt: skip


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Invert g on the batch and look at F's outputs."""
    attention = build_attention(case, device)
    x = inputs_of(case).to(device)
    scale = case.scale * attention.factor
    output = attention.f(x)
    errors = reconstruction_errors(lambda x: scale * attention.f(x), x, case.num_steps)
    return Result(errors, x.std().item(), output.std().item())


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
    if case.weights == "random":
        return random_attention(case, device)
    size = case.num_tokens, case.d_model, case.num_heads
    trained = trained_attention(case.map, *size, case.train_steps, case.seed)
    return Attention(trained.to(device), 1.0)


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
    if isinstance(module, L2Attention) and case.map == "contractive_kim":
        w_o = module.w_o.flatten(0, 1)
        factor = 1 / kim.entry_max_bound(module.w_q, module.w_v, w_o, case.num_tokens)
    elif isinstance(module, L2Attention) and case.map == "contractive":
        weights = module.weights()
        factor = 1 / contractive.token_max_bound(*weights, case.num_tokens)
    return Attention(module.to(device), factor)


def training_options(
    map: Map, num_tokens: int, d_model: int, num_heads: int, train_steps: int, seed: int
) -> depth_stability.Options:
    """A one-layer model of the study of depth."""
    words = [
        f"kinds=[{map}]", "depths=[1]", f"d_model={d_model}", f"num_heads={num_heads}",
        f"seq_len={num_tokens}", f"num_steps={train_steps}", f"seed={seed}", "lr=2e-3",
        "position_bias=false",
    ]  # fmt: skip
    return load_config(words, depth_stability.Options)


@lru_cache(maxsize=4)
@torch.enable_grad()
def trained_attention(
    map: Map, num_tokens: int, d_model: int, num_heads: int, train_steps: int, seed: int
) -> nn.Module:
    """The attention of a one-layer language model after some training, in float64."""
    options = training_options(map, num_tokens, d_model, num_heads, train_steps, seed)
    (case,) = depth_stability.cases(options)
    model = depth_stability.build_kind(case)
    train_by_adam(model, case)
    block = model.stack.blocks[0]
    assert isinstance(block, PreNormBlock)
    return block.attention.inner.double()


def spread(case: Case, result: Result) -> float:
    """How much wider than X its outputs are spread."""
    return result.output_std / result.input_std


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The verdict is about random weights, as in the paper's figure."""
    more = {
        f"error @{k}": lambda case, result, k=k: result.errors[: k + 1][-1]
        for k in (10, 20, rows[0][0].num_steps)
    }
    names = ("map", "weights", "reach", "scale", "num_tokens", "d_model")
    lines = table(rows, names, more | {"std F(X)/std X": spread})
    random = [row for row in rows if row[0].weights == "random"]
    groups = by(random, "map", "reach").items()
    ours = "; ".join(f"{map} on ±{r:g}: {inverted_scales(group)}" for (map, r), group in groups)
    paper = (
        "dot product is not inverted, L2 is for small enough c (c in 0.5, 0.7, 0.9; a figure "
        "without numbers, input range not stated); the outputs of trained dot product spread much "
        "wider than those of L2"
    )
    outcome, why = verdict(random)
    if wider := output_spread(rows):
        why += f"; {wider}"
    return Summary(lines, paper, ours, outcome, why)


def inverted_scales(rows: Rows[Case, Result]) -> str:
    """The c at which every case was inverted, in words."""
    good = {c: all(values(group, "inverted")) for c, group in sorted(by(rows, "scale").items())}
    if all(good.values()):
        return "inverted for every c"
    scales = ", ".join(str(c) for c, held in good.items() if held)
    return f"inverted for c = {scales}" if scales else "never inverted"


def verdict(random: Rows[Case, Result]) -> tuple[Outcome, str]:
    """Whether dot product fails and L2 does not, and on which range."""
    dot_product = [row for row in random if row[0].map == "dot_product"]
    dot = {reach: inverted_scales(group) for reach, group in by(dot_product, "reach").items()}
    said = "; ".join(f"on ±{reach:g} dot product is {words}" for reach, words in dot.items())
    others = [r.errors[-1] for c, r in random if c.map != "dot_product" and not r.inverted]
    if others:
        return "not reproduced", f"an L2 map was not inverted (error {max(others):.1e}); {said}"
    outcome: Outcome = "reproduced" if "never inverted" in dot.values() else "not reproduced"
    return outcome, f"every L2 map reaches 1e-12; {said}: the range decides"


def output_spread(rows: Rows[Case, Result]) -> str:
    """What the trained weights say about the paper's output-variance experiment."""
    trained = [row for row in rows if row[0].weights == "trained"]
    widest = max((case.reach for case, _ in trained), default=0.0)
    found = {c.map: spread(c, r) for c, r in trained if c.reach == widest}
    if len(found) < 2:
        return ""
    ratio = found["dot_product"] / found["l2"]
    seen = "as in the paper" if ratio >= MUCH_WIDER else "not the paper's much wider spread"
    return f"trained dot product spreads its outputs {ratio:.2f} times as wide as L2, {seen}"


def draw(rows: Rows[Case, Result]) -> Figure:
    """Error against step, a panel per range and origin of the weights, in the first size."""
    size = rows[0][0].num_tokens, rows[0][0].d_model
    shown = [(case, result) for case, result in rows if (case.num_tokens, case.d_model) == size]
    groups = by(shown, "weights", "reach")
    figure, axes = panels(len(groups), 1)
    for one, ((weights, reach), group) in zip(axes, groups.items(), strict=True):
        for index, (case, result) in enumerate(group):
            floored = [max(error, 1e-17) for error in result.errors]
            label = f"{case.map}, c = {case.scale:g}"
            one.plot(floored, markevery=max(1, case.num_steps // 10), label=label, **look_of(index))
        one.set(
            xlabel="fixed-point step", ylabel="largest |x − x*| over the batch (units of X)",
            yscale="log", title=f"{weights} weights, inputs on ±{reach:g}",
        )  # fmt: skip
        one.legend(fontsize="x-small", ncols=2)
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
