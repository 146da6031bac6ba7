"""The inverse against search: what it costs to bring a text back from exact top states.

SipIt (Nikolaou et al. 2025, arXiv 2510.15511) finds the symbol of one position after the other: a
candidate is right if its state behind the symbols found so far is the one given. In ``random``
order candidates are tried 256 at a time until one fits. ``gradient`` descends on the distance in
the space of embeddings and tries the nearest symbol not tried yet, one at a time, as SipIt
does. ``inverse`` undoes all positions at once by fixed points, and takes the nearest symbols.

The model is certified in token_max, without diagonal scalings, 4 layers of width 128, with its
initial weights and rows of the embedding drawn at random. Search is measured at ``num_places``
places spread over the text; its time and passes are scaled to all. A pass is one token through the
stack. All in float64.

Verdict: passes of the inverse grow by less than a tenth from the smallest vocabulary to the
largest, and at the largest it is the fastest at every length.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.assemble.model import build_model
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.config.schema import ModelConfig
from invformer.config.section import option
from invformer.nn.proof import certify
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.l2_attention import merge_heads
from studies.report import Figure, Finding, Rows, Summary, by, curves, panels, table, values
from studies.study import Study, StudyOptions, grid, program

Method = Literal["inverse", "random", "gradient"]
TOGETHER = 256  # candidates of one batch
FITS = 1e-4  # of the length of a state: nearer is the same
DESCENTS = 50  # steps of the gradient policy, then random order
RATE = 0.3


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Bring random texts back in three ways."""

    lengths: list[int] = option([64, 256, 1024], "characters of a text", "[2, 1e5]")
    vocabularies: list[int] = option([65, 256, 50_000], "symbols", "[2, 1e7]")
    num_places: int = option(4, "places at which search is measured", "[1, 1e5]")
    d_model: int = option(128, "width", "[16, 1e5]")


@dataclass(frozen=True)
class Case:
    """One size and method."""

    length: int
    vocab_size: int
    method: Method
    num_places: int
    d_model: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Of a whole text."""

    time: float  # seconds
    decoding: float | None  # of them, seconds of finding the nearest symbols
    passes: float
    recovered: float
    proven: float  # without trying a symbol: only one lies within the error bound


def cases(options: Options) -> list[Case]:
    """Every size in three ways."""
    sizes = {"vocab_size": options.vocabularies, "length": options.lengths}
    return grid(Case, options, **sizes, method=get_args(Method))


@lru_cache(maxsize=1)
def model_and_text(length: int, vocab_size: int, d_model: int, seed: int) -> tuple[Any, Tensor]:
    """A model with its initial weights, and a random text."""
    torch.manual_seed(seed)
    config = ModelConfig(
        name="contractive_bounded", certificate="token_max", d_model=d_model,
        num_heads=16, d_head=max(1, d_model // 16), num_layers=4, diagonal_scaling=False,
    )  # fmt: skip
    model = build_model(config, vocab_size, length).eval()
    text = torch.randint(vocab_size, (1, length))
    model.initialise(text)
    return model.double(), text


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Bring the text back."""
    model, text = model_and_text(case.length, case.vocab_size, case.d_model, case.seed)
    z = model.stack(model.embedding(text))
    if case.method == "inverse":
        return by_inverse(model, text, z)
    return by_search(model, text, z, case)


def by_inverse(model: CharTransformer, text: Tensor, z: Tensor) -> Result:
    """All positions at once; the certificate is there before a text is."""
    assert isinstance(model.stack, InvertibleStack)
    weights, certificate = model.stack.weights(), certify(model, dtype=z.dtype)
    start = time.perf_counter()
    solution = model.stack.inverse(z, weights, certificate)
    middle = time.perf_counter()
    found, second = nearest_symbols(model, solution.value)
    end = time.perf_counter()
    evaluations = sum(int(s.num_evaluations.max()) for s in solution.layers.values())
    return Result(
        time=end - start,
        decoding=end - middle,
        passes=evaluations / len(solution.layers) * text.numel(),
        recovered=(found == text).double().mean().item(),
        proven=(second > solution.error_bound).double().mean().item(),
    )


def nearest_symbols(model: CharTransformer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest symbols, and how far the second nearest are."""
    table, position = model.embedding.token.weight, model.embedding.position
    e = x[..., : table.shape[1]] - position[: x.shape[-2]]
    distances, symbols = torch.cdist(e, table[None]).topk(2, largest=False)
    return symbols[..., 0], distances[..., 1]


class Prefix:
    """A text that is known up to a position, and the states of what may come next.

    Every attention keeps the keys and values of the known symbols, so that a candidate for the next
    position costs one token's pass through the stack. ``length`` symbols are known, and branches
    have been evaluated for ``branch_rows`` tokens.
    """

    def __init__(self, model: CharTransformer) -> None:
        self.model, self.weights, self.length, self.branch_rows = model, model.weights(), 0, 0
        self.past: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.latest: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def passes(self) -> float:
        """``branch_rows`` in forward passes of one token."""
        return self.branch_rows / (2 * len(self.model.stack.blocks))

    def embed(self, symbols: Integer[Tensor, "candidates"]) -> Float[Tensor, "1 candidates width"]:
        """The stack's input for candidates of the next symbol."""
        return self.model.embedding(symbols[:, None], self.length).transpose(0, 1)

    def states(self, x: Float[Tensor, "1 candidates width"]) -> Tensor:
        """The top states of candidates for the next position, given as the stack's input."""
        return self.model.through_stack(x, self.branch, self.weights)

    def append(self, symbol: Integer[Tensor, "1"]) -> None:
        """Take the next symbol as known."""
        self.states(self.embed(symbol))
        for branch, new in self.latest.items():
            known = self.past.get(branch, tuple(t[:, :, :0] for t in new))
            self.past[branch] = torch.cat([known[0], new[0]], 2), torch.cat([known[1], new[1]], 2)
        self.length += 1

    def branch(self, layer: Any, x: Tensor, of_layer: Any) -> Tensor:
        """The branch of one layer for every candidate behind the known symbols."""
        self.branch_rows += x.shape[1]
        branch, weights = layer.branch, of_layer.branch
        if not isinstance(branch, BoundedAttention):
            return branch(x, weights)
        q, k, v = branch.in_ball(x, weights)
        q = q * weights.temperature[:, None, None]
        self.latest[branch] = k, v
        keys, values = self.past.get(branch, (k[:, :, :0], v[:, :, :0]))
        to_itself = (q * k).sum(-1, keepdim=True)
        bias = branch.position.last_rows(1, self.length + 1).to(q)
        p = (torch.cat([q @ keys.mT, to_itself], -1) + bias).softmax(-1)
        y = merge_heads(p[..., :-1] @ values + p[..., -1:] * v)
        return y @ weights.g.flatten(-3, -2)


def by_search(model: CharTransformer, text: Tensor, z: Tensor, case: Case) -> Result:
    """Some positions, each behind the true symbols; time and passes are scaled to all."""
    descents = DESCENTS if case.method == "gradient" else 0
    places = torch.linspace(0, case.length - 1, min(case.num_places, case.length)).long().tolist()
    prefix, generator = Prefix(model), torch.Generator().manual_seed(case.seed)
    seconds, passes, right = 0.0, 0.0, 0
    for place in range(case.length):
        if place in places:
            before, start = prefix.passes, time.perf_counter()
            found = sought(prefix, z[:, place : place + 1], descents, generator)
            seconds += time.perf_counter() - start
            passes += prefix.passes - before
            right += int(found.item() == text[0, place].item())
        prefix.append(text[:, place])
    scale = case.length / len(places)
    return Result(seconds * scale, None, passes * scale, right / len(places), 0.0)


def first_fitting(prefix: Prefix, order: Tensor, target: Tensor) -> Tensor:
    """The first symbol in an order of them whose state is the target, 256 at a time; or −1."""
    for some in order.split(TOGETHER):
        apart = (prefix.states(prefix.embed(some)) - target).norm(dim=-1)
        if bool(apart.min() <= FITS * target.norm()):
            return some[apart.argmin()]
    return torch.tensor(-1)


def sought(prefix: Prefix, target: Tensor, descents: int, generator: torch.Generator) -> Tensor:
    """Descend on ½‖F(e) − z‖² and try the nearest symbol not tried yet; then a random order."""
    embedding = prefix.model.embedding
    table, room = embedding.token.weight, (0, embedding.padding)
    zero = prefix.embed(torch.tensor([0])) - nn.functional.pad(table[:1], room)
    e, tried = table.mean(0, keepdim=True)[None], torch.zeros(len(table))
    for _ in range(descents):
        with torch.enable_grad():
            e = e.detach().requires_grad_()
            away = prefix.states(zero + nn.functional.pad(e, room)) - target
            (gradient,) = torch.autograd.grad(away.square().sum() / 2, e)
        prefix.branch_rows += 2 * 2 * len(prefix.model.stack.blocks)  # a backward pass is two
        e = e - RATE * gradient
        guess = ((table - e[0]).norm(dim=-1) + tried).argmin()[None]
        tried[guess] = torch.inf
        if bool((prefix.states(prefix.embed(guess)) - target).norm() <= FITS * target.norm()):
            return guess
    rest = torch.randperm(len(table), generator=generator)
    return first_fitting(prefix, rest[tried[rest] == 0], target)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The inverse against the faster order of search at every length."""
    findings: list[Finding] = []
    largest, least = (f(values(rows, "vocab_size")) for f in (max, min))
    for length, group in by(rows, "length").items():
        found = {(c.vocab_size, c.method): r for c, r in group}
        growth = found[largest, "inverse"].passes / found[least, "inverse"].passes
        findings.append((growth < 1.1, f"{length}: passes grow {growth:.2f} times"))
        others = [r.time for (v, m), r in found.items() if v == largest and m != "inverse"]
        gain = min(others) / found[largest, "inverse"].time
        findings.append((gain > 1, f"{length}, {largest:,} symbols: {gain:.3g} times as fast"))
        fastest = min((r.time, m) for (v, m), r in found.items() if v == least)[1]
        findings.append((None, f"{length}, {least} symbols: {fastest} is fastest"))
    lines = table(rows, more={"passes a character": passes_each}, without=("passes",))
    return Summary(lines, findings)


def passes_each(case: Case, result: Result) -> float:
    """Passes a character."""
    return result.passes / case.length


def draw(rows: Rows[Case, Result]) -> Figure:
    """Seconds and passes against the vocabulary, a line per length and method."""
    figure, (seconds, passes) = panels(1, 2)
    for axes, name, ylabel in (
        (seconds, "time", "seconds for a whole text"),
        (passes, passes_each, "forward passes a character"),
    ):
        curves(axes, rows, "vocab_size", name, ("method", lambda c, _: f"{c.length:,} characters"))
        axes.set(xlabel="symbols in the vocabulary", ylabel=ylabel, xscale="log", yscale="log")
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
