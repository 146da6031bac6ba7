"""Castin et al. 2024, Fig. 1: the local constant of attention layers against sequence length.

‖Df(X)‖ (frobenius) of one bare multi-head attention layer f, by power iteration in float64; the
exponent of C nᵅ, or C (n − 1)ᵅ under attack, is fitted with a bootstrap interval.

``on text``       the first and the middle layer of ours at initialisation (dot product, tied L2,
                  contractive L2), or of a trained model (checkpoint=RUN_FOLDER) on its test text
``under attack``  random weights of the shape and size of GPT-2's at initialisation, one head alone,
                  all heads, and tied L2 attention with the same W^Q and W^V

Verdict: all heads of the attacked layer, at the published R and at three lengths or more, have an
exponent within 0.05 of ½ and C within a factor of two of the paper's. One head alone is √(n − 1)
for any weights (Prop. 3.4) and checks the code; the rest is not in the paper.
"""

import copy
import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer import load
from invformer.assemble.model import build_model
from invformer.branches.tied_l2.attention import TiedL2Attention
from invformer.branches.tied_l2.kim import paper_output_map
from invformer.config.schema import AttentionName, DataConfig, ModelConfig
from invformer.config.section import option
from invformer.data.corpora import Corpus, read_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError, DataError
from invformer.lipschitz.power_iteration import operator_norm
from invformer.nn.transformer import CharTransformer
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.runs.checkpoint import read_checkpoint
from invformer.weights.position_bias import VisibilityMask
from studies import castin
from studies.layer_bounds import jacobian_of, project, tied_attention
from studies.power_law import Fit, fit
from studies.report import Figure, Finding, Rows, Summary, by, curves, look_of, panels
from studies.study import Study, StudyOptions, grid, program
from studies.training import recorded_inputs

OURS: tuple[AttentionName, ...] = ("dot_product", "l2", "contractive_l2")
SMALL_LAYERS, SMALL_CONTEXT = 4, 128
GPT2_INIT, GPT2_WIDTH, GPT2_HEADS = 0.02, 768, 12
PUBLISHED_RADIUS, LARGE_RADIUS = 100.0, 1000.0  # R of the attack
L2_RADII = tuple(2.0**k for k in range(-8, 1))  # L2 is attacked at all of these, in units of R
PUBLISHED_C = 0.92  # C n^(1/2) of all heads, the attack made for head 0
EXPONENT_TOLERANCE = 0.05  # of the attack's 1/2
COEFFICIENT_FACTOR = 2.0  # between the paper's C and ours
MAX_STEPS, RTOL = 200, 1e-4  # of power iteration
DTYPE = torch.float64


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Growth of the local Lipschitz constant with the sequence length, on text and under attack."""

    checkpoint: str | None = option(None, "run folder; null is small layers at initialisation")
    sizes: list[int] = option([4, 8, 16, 32, 64, 96], "n on text, tokens", "[2, 1e5]")
    num_sequences: int = option(4, "texts per n, the same starts for all n", "[1, 1e4]")
    attack_sizes: list[int] = option([7, 17, 32, 47, 62, 77, 97], "n under attack", "[2, 1e5]")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer at one length.

    ``path`` is the model's run folder, ``sha256`` the content of its checkpoint and of the text;
    ``radius`` is R under attack, 0 on text; ``alone`` measures the attacked head only.
    """

    path: str = ""
    attention: AttentionName
    layer: int = 0
    causal: bool = False
    num_tokens: int
    alone: bool = False
    radius: float = 0.0
    num_sequences: int = 1
    sha256: str = ""
    seed: int


@dataclass(frozen=True)
class Result:
    """‖Df(X)‖ in ``frobenius`` from below, per sequence; ``converged`` is the share within rtol."""

    constants: list[float]
    converged: float


def cases(options: Options) -> list[Case]:
    """Lengths on text, then the attack on random weights."""
    attentions, num_layers, context = OURS, SMALL_LAYERS, SMALL_CONTEXT
    path = options.checkpoint or ""
    sha256 = corpus_of(path).sha256[:16] if options.sizes else ""
    if path:
        checkpoint = read_checkpoint(path)
        trained = checkpoint.configuration(monitor={})
        model = trained.model
        if model.name not in OURS:
            raise ConfigurationError(f"checkpoint: {model.name} is none of {', '.join(OURS)}")
        attentions, num_layers, context = (model.name,), model.num_layers, trained.data.seq_len
        sha256 = checkpoint.sha256[:16] + sha256
    sizes = [n for n in options.sizes if n <= context]
    if len(sizes) < len(options.sizes):
        print(f"growth: the model takes at most {context} tokens; longer sizes are left out")
    same = {"path": path, "sha256": sha256}
    masks = [True] if path else [True, False]  # unmasked, a trained layer would lose its bias
    layers = sorted({0, num_layers // 2})
    on_text = grid(
        Case, options, same, attention=attentions, layer=layers, causal=masks, num_tokens=sizes
    )
    kinds: list[tuple[AttentionName, bool, float]] = [
        ("dot_product", True, PUBLISHED_RADIUS),
        ("dot_product", False, PUBLISHED_RADIUS),
        ("dot_product", False, LARGE_RADIUS),
        ("l2", True, PUBLISHED_RADIUS),
    ]
    return on_text + [
        Case(attention=attention, num_tokens=n, alone=alone, radius=radius, seed=options.seed)
        for attention, alone, radius in kinds
        for n in options.attack_sizes
    ]


def measure(case: Case, device: torch.device) -> Result:
    """The layer at its texts, or under attack; small matrices, so never on the ``device``."""
    return attack(case) if case.radius else on_text(case)


def estimate(jacobian: LinearMap, seed: int) -> Result:
    """‖Df(X)‖."""
    found = operator_norm(jacobian, "frobenius", num_steps=MAX_STEPS, rtol=RTOL, seed=seed)
    return Result(found.value.tolist(), found.converged.double().mean().item())


def corpus_of(path: str) -> Corpus:
    """The text of a run, or python_docs."""
    return read_corpus(
        read_checkpoint(path).configuration(monitor={}).data if path else DataConfig()
    )


@lru_cache(maxsize=1)
def model_and_text(
    path: str, attention: AttentionName, seed: int
) -> tuple[CharTransformer, Tensor]:
    """A trained model, or a small one without position bias: its mask alone says who sees whom."""
    words = corpus_of(path).split("test" if path else "train")
    if path:
        trained = load(path, "cpu")
        return trained.network.to(DTYPE), trained.vocabulary.encode(words).long()
    vocabulary = Vocabulary.from_text(words)
    config = ModelConfig(
        name=attention, certificate="token_max" if attention == "contractive_l2" else None,
        d_model=64, num_heads=4, num_layers=SMALL_LAYERS, position_bias=False,
        diagonal_scaling=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = build_model(config, vocabulary.size, SMALL_CONTEXT).to(DTYPE).eval()
    return model, vocabulary.encode(words).long()


def sequences(
    tokens: Tensor, num_tokens: int, count: int, seed: int
) -> Float[Tensor, "count tokens"]:
    """Sequences that do not overlap, from places that depend on the seed and not on n.

    Raises:
        DataError: the text is too short.
    """
    room = len(tokens) // count
    if room < 2 * num_tokens:
        raise DataError(
            f"the text has {len(tokens)} tokens, too few for {count} places of {2 * num_tokens}; "
            "choose fewer num_sequences or smaller sizes"
        )
    share = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    starts = room * torch.arange(count) + (share * (room // 2)).long()
    return tokens[starts[:, None] + torch.arange(num_tokens)]


def on_text(case: Case) -> Result:
    """A layer at the inputs that its model gives it, or one in which every token sees all."""
    model, text = model_and_text(case.path, case.attention, case.seed)
    with torch.no_grad(), recorded_inputs(model) as found:
        model(sequences(text, case.num_tokens, case.num_sequences, case.seed))
    layer, x = found[case.layer]
    if case.causal:
        jacobian = jacobian_of(layer, x)
    elif isinstance(layer, TiedL2Attention):  # a contractive layer's weights depend on its mask
        weights = layer.weights()
        jacobian = linearise(lambda z: tied_attention(z, *weights), x)
    else:
        layer = copy.deepcopy(layer)
        layer.position = VisibilityMask(torch.ones(2 * [case.num_tokens], dtype=torch.bool))
        jacobian = jacobian_of(layer, x)
    return estimate(jacobian, case.seed)


def attack(case: Case) -> Result:
    """The paper's two clusters, made for one dot-product head; L2 takes the worst of more radii."""
    weights = random_weights(case.seed)
    w_q, w_k, w_v = (w[:1] for w in weights) if case.alone else weights
    d_head = w_q.shape[-1]
    a = w_k[0] @ w_q[0].mT / math.sqrt(d_head)  # has the eigenvalue 0, so a real one
    x = castin.two_cluster_tokens(a, case.radius, case.num_tokens)[None]
    if case.attention == "dot_product":
        return estimate(linearise(lambda z: dot_product(z, w_q, w_k, w_v), x), case.seed)
    # The value path of tied L2 has the factor W^Q W^Qᵀ/√d, tiny for small weights: scaled to one.
    size = torch.linalg.matrix_norm(w_q[0], 2).square() / math.sqrt(d_head)
    g = paper_output_map(w_q, w_v, torch.eye(d_head, GPT2_WIDTH, dtype=DTYPE)) / size
    jacobians = (linearise(lambda z: tied_attention(z, w_q, g), s * x) for s in L2_RADII)
    found = (estimate(jacobian, case.seed) for jacobian in jacobians)
    return max(found, key=lambda result: result.constants)


@lru_cache(maxsize=1)
def random_weights(seed: int) -> tuple[Tensor, ...]:
    """W^Q, W^K and W^V of the shape and size of GPT-2's at initialisation, (H, D, d) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (GPT2_WIDTH, 3 * GPT2_WIDTH)
    parts = GPT2_INIT * torch.randn(shape, generator=generator, dtype=DTYPE)
    return tuple(split_heads(w, GPT2_HEADS) for w in parts.chunk(3, dim=1))


def dot_product(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """f(X) = [softmax(Q_h K_hᵀ/√d) V_h]_h in the first H d channels; every token sees all."""
    q, k, v = (project(x, w) for w in (w_q, w_k, w_v))
    y = merge_heads((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return nn.functional.pad(y, (0, x.shape[-1] - y.shape[-1]))


Part = Rows[Case, Result]  # one curve, by growing n


def label(case: Case) -> str:
    """A curve in words."""
    attention = case.attention.replace("_", " ")
    if case.radius:
        radius = f"R {'≤' if case.attention == 'l2' else '='} {case.radius:g}"
        heads = "one head" if case.alone else "all heads"
        return f"random N(0, {GPT2_INIT}²) weights of GPT-2's shape, {attention}, {heads}, {radius}"
    model, mask = "checkpoint" if case.path else "small", "causal" if case.causal else "unmasked"
    return f"{model} {attention} layer {case.layer}, {mask}"


def fits(rows: Rows[Case, Result]) -> list[tuple[Part, Fit | None]]:
    """Every curve over n, with its fit if there are enough lengths: in n − 1 under attack.

    Prop. 3.4 has √(n − 1): fitted in n it would look like n^0.53 at these lengths, for any weights.
    """
    found = []
    for curve in by(rows, lambda case, _: label(case)).values():
        part = sorted(curve, key=lambda row: row[0].num_tokens)
        others = part[0][0].radius > 0
        points = [(c.num_tokens - others, r.constants) for c, r in part]
        found.append((part, fit(points, "(n-1)" if others else "n")))
    return found


def constant(case: Case, result: Result) -> float:
    """The mean constant of the sequences."""
    return fmean(result.constants)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every curve and its fit; a claim only where the paper measured the same."""
    found = fits(rows)
    lines = [
        {"layer": label(part[0][0]), "fit": one and str(one)}
        | {f"n = {c.num_tokens}": constant(c, r) for c, r in part}
        for part, one in found
    ]
    return Summary(lines, [finding(part, one) for part, one in found if one])


def finding(part: Part, one: Fit) -> Finding:
    """The fit in words, and whether it is the paper's."""
    case = part[0][0]
    words = f"{label(case)}: {one}"
    if case.attention != "dot_product" or case.alone or case.radius != PUBLISHED_RADIUS:
        return None, words
    # C of C √n, least squares in logarithms, as the paper gives it
    roots = ((constant(c, r), math.sqrt(c.num_tokens)) for c, r in part)
    coefficient = math.exp(fmean(math.log(found / root) for found, root in roots))
    ratio = max(coefficient / PUBLISHED_C, PUBLISHED_C / coefficient)
    holds = abs(one.exponent - 0.5) <= EXPONENT_TOLERANCE and ratio <= COEFFICIENT_FACTOR
    return holds, f"{words}, C of C n^(1/2) {coefficient:.3g}, the paper's {PUBLISHED_C:g}"


def draw(rows: Rows[Case, Result]) -> Figure:
    """Constants against n, on text and under attack."""
    figure, axes = panels(1, 2)
    for index, (part, _) in enumerate(fits(rows)):
        case = part[0][0]
        one = axes[case.radius > 0]
        curves(one, part, "num_tokens", constant, label=label(case), **look_of(index))
    for one, title in zip(axes, ("text", "two clusters"), strict=True):
        one.set(
            xlabel="sequence length n (tokens)", xscale="log", yscale="log",
            ylabel="local constant, frobenius (no unit)", title=title,
        )  # fmt: skip
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
