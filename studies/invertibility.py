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
bias). Also measured: the spread of F(X) beside that of X.

Reproduced means that on some range dot product is inverted to 1e-12 at no c, while every L2 map is
on every range.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import nn

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.tied_l2.kim import L2Attention
from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.transformer import PreNormBlock
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Tokens
from invformer.weights.position_bias import VisibilityMask
from studies import kim
from studies.report import Figure, Finding, Rows, Summary, by, look_of, panels, table, values
from studies.study import Study, case_of, grid, program, progress
from studies.training import ModelCase, ModelOptions, TextConfig, new_model, train_by_adam

Map = Literal["dot_product", "l2", "contractive_kim", "contractive"]
Weights = Literal["random", "trained"]

REACHED = 1e-12  # the error at which a float64 inverse counts as found


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Invert residual attention maps by fixed-point iteration."""

    scales: list[float] = option([0.5, 0.7, 0.9], "c", "(0, 1)")
    ranges: list[float] = option([1.0, 10.0], "r, inputs are uniform on [-r, r]", "(0, 1e6]")
    seq_len: int = option(64, "N, tokens", "[2, 1e4]")
    d_model: int = option(64, "D, channels", "[1, 1e4]")
    num_heads: int = option(8, "heads, a divisor of the width", "[1, 1e4]")
    batch_size: int = option(16, "inputs; the worst counts", "[1, 1e5]")
    num_steps: int = option(200, "steps of the iteration", MANY)
    train_steps: int = option(200, "of Adam, for trained weights; 0 is without", "[0, 1e6]")


@dataclass(frozen=True)
class Case:
    """One map on one batch of inputs; ``sha256`` is that of the text that trained weights read."""

    map: Map
    weights: Weights
    scale: float
    reach: float
    seq_len: int
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
    spread: float  # standard deviation of the entries of F(X), without the factor s, over that of X

    @property
    def inverted(self) -> bool:
        """Whether the iteration arrived and stayed."""
        return self.errors[-1] <= REACHED


def cases(options: Options) -> list[Case]:
    """Random and trained weights, each at every range and c."""
    inputs = {"reach": options.ranges, "scale": options.scales}
    random = {"weights": "random", "train_steps": 0, "sha256": ""}
    found = grid(Case, options, random, map=get_args(Map), **inputs)
    if options.train_steps:
        trained = {"weights": "trained", "sha256": training(options).sha256}
        found += grid(Case, options, trained, map=("dot_product", "l2"), **inputs)
    return found


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Invert g on the batch and look at F's outputs."""
    if case.weights == "random":
        attention, factor = random_attention(case)
    else:
        attention, factor = trained_attention(case.map, training(case)), 1.0
    f, x = attention.to(device), inputs_of(case).to(device)
    scale, spread = case.scale * factor, f(x).std() / x.std()
    errors = reconstruction_errors(lambda x: scale * f(x), x, case.num_steps)
    return Result(errors, spread.item())


def reconstruction_errors(f: SequenceMap, x: Tokens, num_steps: int) -> list[float]:
    """max |x_k − x| of x_{k+1} = y − f(x_k), y = x + f(x), x_0 = y, for k = 0 … num_steps."""
    guess = y = x + f(x)
    errors = [(guess - x).abs().max().item()]
    for _ in progress(range(num_steps), "fixed-point iteration"):
        guess = y - f(guess)
        errors.append((guess - x).abs().max().item())
    return errors


def inputs_of(case: Case) -> Tokens:
    """Uniform on [−r, r], the last token zero: under a causal mask it is the one that sees all."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch_size, case.seq_len, case.d_model)
    x = case.reach * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    x[:, -1] = 0
    return x


def random_attention(case: Case) -> tuple[nn.Module, float]:
    """F with Glorot-uniform weights and no mask; the factor of its theorem, or 1."""
    everyone = torch.ones(case.seq_len, case.seq_len, dtype=torch.bool)
    kind = DotProductAttention if case.map == "dot_product" else L2Attention
    module = kind(case.d_model, case.num_heads, VisibilityMask(everyone)).double()
    generator = torch.Generator().manual_seed(case.seed + 1)
    limit = math.sqrt(3 / case.d_model)  # Glorot for a D × D matrix; heads are slices of one
    for weight in module.parameters():
        nn.init.uniform_(weight, -limit, limit, generator=generator)
    if isinstance(module, L2Attention) and case.map == "contractive_kim":
        parts = module.w_q, module.w_v, module.w_o.flatten(0, 1)
        return module, 1 / kim.entry_max_bound(*parts, kim.log_mass_of(case.seq_len))
    if isinstance(module, L2Attention) and case.map == "contractive":
        return module, 1 / module.lipschitz_bound("token_max")
    return module, 1.0


def training(size: Options | Case) -> ModelCase:
    """The training of a one-layer model with as many tokens and channels."""
    return case_of(
        ModelCase, size, **TextConfig().case_fields(size.seq_len), num_layers=1, lr=2e-3,
        batch_size=16, num_steps=size.train_steps,
    )  # fmt: skip


@lru_cache(maxsize=4)
@torch.enable_grad()
def trained_attention(map: Map, case: ModelCase) -> nn.Module:
    """The attention of a one-layer language model after some training, in float64."""
    model = new_model(case, name=map, certificate=None, position_bias=False)
    train_by_adam(model, case)
    block = model.stack.blocks[0]
    assert isinstance(block, PreNormBlock)
    return block.attention.inner.double()


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Claims are about random weights, as in the paper's figure."""
    more = {"error": lambda _, result: result.errors[-1]}
    groups = by([row for row in rows if row[0].weights == "random"], "map", "reach")
    inverted = {key: values(group, "inverted") for key, group in groups.items()}
    never = any(not any(found) for (map, _), found in inverted.items() if map == "dot_product")
    always = all(all(found) for (map, _), found in inverted.items() if map != "dot_product")
    findings: list[Finding] = [(never, "dot product is inverted at no c on some range")]
    for (map, reach), group in groups.items():
        findings.append((None, f"{map} on ±{reach:g}: {inverted_scales(group)}"))
    widest = max(values(rows, "reach"))
    spread = {c.map: r.spread for c, r in rows if (c.weights, c.reach) == ("trained", widest)}
    if spread:
        times = f"{spread['dot_product'] / spread['l2']:.2f} times as wide as L2"
        words = f"trained dot product spreads its outputs {times}; the paper: much wider"
        findings.append((None, words))
    lines = table(rows, ("map", "weights", "reach", "scale"), more)
    return Summary(lines, findings, must=[(always, "every L2 map is inverted at every c")])


def inverted_scales(rows: Rows[Case, Result]) -> str:
    """The c at which a map was inverted, in words."""
    good = [case.scale for case, result in rows if result.inverted]
    if len(good) == len(rows):
        return "inverted for every c"
    return f"inverted for c = {', '.join(map(str, sorted(good)))}" if good else "never inverted"


def draw(rows: Rows[Case, Result]) -> Figure:
    """Error against step, a panel per range and origin of the weights."""
    groups = by(rows, "weights", "reach")
    figure, axes = panels(len(groups), 1)
    for one, ((weights, reach), group) in zip(axes, groups.items(), strict=True):
        for index, (case, result) in enumerate(group):
            look = {"markevery": max(1, case.num_steps // 10), **look_of(index)}
            one.plot(result.errors, label=f"{case.map}, c = {case.scale:g}", **look)
        one.set(
            xlabel="fixed-point step", ylabel="largest |x − x*| over the batch (units of X)",
            yscale="log", title=f"{weights} weights, inputs on ±{reach:g}",
        )  # fmt: skip
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
