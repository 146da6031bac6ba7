"""Castin et al. 2024, Fig. 1: the local constant of attention layers against sequence length.

‖Df(X)‖ (frobenius) of one bare multi-head attention layer f, by power iteration in float64; the
exponent of C nᵅ, or C (n − 1)ᵅ in unmasked attacks, is fitted with a bootstrap interval.

``on text``       the first and the middle layer of ours at initialisation (dot product, tied L2,
                  contractive L2), or of a trained model (checkpoint=RUN_FOLDER) on its test text
``pretrained``    every attention module and block of an encoder or a decoder of Hugging Face's
                  transformers (pretrained=NAME_OR_FOLDER text=FILE), masked and unmasked
``under attack``  random weights of the shape and size of GPT-2's at initialisation: the layer, with
                  mask and output projection, its heads without projection, one head alone, and tied
                  L2 attention with the same W^Q and W^V

Verdict: the attacked layer, at the published R and at three lengths or more, has an exponent within
0.05 of ½, and C of C √n within a factor of two of the paper's. Of pretrained weights: the intervals
of all attention modules end below ½. One head alone is √(n − 1) for any weights (Prop. 3.4) and
checks the code; the rest is not in the paper.
"""

import copy
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from invformer import load
from invformer.assemble.model import build_model
from invformer.branches.tied_l2.attention import TiedL2Attention
from invformer.branches.tied_l2.kim import paper_output_map
from invformer.config.schema import AttentionName, DataConfig, ModelConfig
from invformer.config.section import option
from invformer.data.corpora import Corpus, read_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError
from invformer.lipschitz.power_iteration import operator_norm
from invformer.nn.transformer import CharTransformer
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.runs.checkpoint import read_checkpoint
from invformer.weights.position_bias import VisibilityMask
from studies import castin
from studies.layer_bounds import jacobian_of, project, tied_attention
from studies.power_law import Fit, fit
from studies.pretrained import BLOCK, pretrained, sequences
from studies.report import Figure, Finding, Rows, Summary, by, curves, look_of, panels
from studies.study import Study, StudyOptions, grid, program, progress
from studies.training import layer_inputs

OURS: tuple[AttentionName, ...] = ("dot_product", "l2", "contractive_l2")
SMALL_LAYERS, SMALL_CONTEXT = 4, 128  # ours, untrained
GPT2_INIT, GPT2_WIDTH, GPT2_HEADS = 0.02, 768, 12
GPT2_PROJECTION = GPT2_INIT / math.sqrt(2 * 12)  # it has twelve layers of two branches
PUBLISHED_RADIUS, LARGE_RADIUS = 100.0, 1000.0  # R of the attack
L2_RADII = tuple(2.0**k for k in range(-8, 1))  # L2 is attacked at all of these, in units of R
PUBLISHED_C = 0.92  # C n^(1/2) of the layer, the attack made for head 0
EXPONENT_TOLERANCE = 0.05  # of the attack's 1/2
COEFFICIENT_FACTOR = 2.0  # between the paper's C and ours
ON_TEXT = 0.25  # the exponent that the paper observed, roughly
MAX_STEPS, RTOL = 200, 1e-4  # of power iteration
PRETRAINED_RTOL = 1e-3  # whose exponents need no more
DTYPE = torch.float64


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Growth of the local Lipschitz constant with the sequence length, on text and under attack."""

    checkpoint: str | None = option(None, "run folder; null is small layers at initialisation")
    sizes: list[int] = option([4, 8, 16, 32, 64, 96], "n on text, tokens", "[2, 1e5]")
    num_sequences: int = option(4, "texts per n, the same starts for all n", "[1, 1e4]")
    attack_sizes: list[int] = option([7, 17, 32, 47, 62, 77, 97], "n under attack", "[2, 1e5]")
    num_attacked: int = option(4, "random layers under attack", "[1, 1e4]")
    pretrained: str | None = option(None, "name or folder of a model of transformers; needs text")
    text: str | None = option(None, "text file for the pretrained model")

    def check(self) -> None:
        """A pretrained model reads a text, and is measured alone."""
        if (self.pretrained is None) != (self.text is None):
            self.refuse("pretrained", "pretrained=NAME_OR_FOLDER and text=FILE belong together")
        if self.pretrained is not None and self.checkpoint is not None:
            self.refuse("pretrained", "give either a checkpoint or a pretrained model")


Attacked = Literal["", "head", "heads", "layer"]  # head 0, all, all with W^O


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer at one length.

    ``path`` is the run folder or the pretrained model, ``text`` the latter's text, ``sha256`` the
    content of weights and text. ``part`` is an attention of ours, or a module's path in a block.
    Under attack ``radius`` is R, otherwise 0, and ``attacked`` says what of a layer.
    """

    path: str = ""
    text: str = ""
    part: str
    layer: int = 0
    causal: bool = False
    num_tokens: int
    attacked: Attacked = ""
    radius: float = 0.0
    num_sequences: int = 1
    sha256: str = ""
    seed: int


@dataclass(frozen=True)
class Result:
    """‖Df(X)‖ in ``frobenius`` from below, per sequence; ``converged`` is the share within rtol.

    Under attack there is one sequence for each of several random layers.
    """

    constants: list[float]
    converged: float

    @property
    def mean(self) -> float:
        """The mean constant of the sequences."""
        return fmean(self.constants)


def cases(options: Options) -> list[Case]:
    """Lengths on text, then the attack on random weights; or a pretrained model alone."""
    if options.pretrained is not None and options.text is not None:
        found = pretrained(options.pretrained, options.text)
        same = {"path": options.pretrained, "sha256": found.sha256}
        sizes = within(options.sizes, found.context)
        return grid(
            Case, options, same, causal=found.masks, part=found.parts,
            layer=range(len(found.blocks)), num_tokens=sizes,
        )  # fmt: skip
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
    same = {"path": path, "text": "", "sha256": sha256}
    masks = [True] if path else [True, False]  # unmasked, a trained layer would lose its bias
    on_text = grid(
        Case, options, same, part=attentions, layer=sorted({0, num_layers // 2}), causal=masks,
        num_tokens=within(options.sizes, context),
    )  # fmt: skip
    kinds: list[tuple[AttentionName, Attacked, float]] = [
        ("dot_product", "layer", PUBLISHED_RADIUS),
        ("dot_product", "heads", PUBLISHED_RADIUS),
        ("dot_product", "heads", LARGE_RADIUS),
        ("dot_product", "head", PUBLISHED_RADIUS),
        ("l2", "head", PUBLISHED_RADIUS),
    ]
    return on_text + [
        Case(
            part=attention, causal=attacked != "head", num_tokens=n, attacked=attacked,
            radius=radius, num_sequences=options.num_attacked, seed=options.seed,
        )
        for attention, attacked, radius in kinds
        for n in options.attack_sizes
    ]  # fmt: skip


def within(sizes: list[int], context: int | None) -> list[int]:
    """The lengths that a model takes."""
    found = [n for n in sizes if context is None or n <= context]
    if len(found) < len(sizes):
        print(f"growth: the model takes at most {context} tokens; longer sizes are left out")
    return found


def measure(case: Case, device: torch.device) -> Result:
    """The layer at its texts, or under attack; small matrices, so never on the ``device``."""
    if case.attacked:
        return joined([attack(case, case.seed + i) for i in range(case.num_sequences)])
    return on_pretrained(case) if case.text else on_text(case)


def joined(found: list[Result]) -> Result:
    """The constants of several sequences."""
    constants = [c for each in found for c in each.constants]
    return Result(constants, fmean(each.converged for each in found))


def estimate(jacobian: LinearMap, seed: int, rtol: float = RTOL) -> Result:
    """‖Df(X)‖."""
    found = operator_norm(jacobian, "frobenius", num_steps=MAX_STEPS, rtol=rtol, seed=seed)
    return Result(found.value.flatten().tolist(), found.converged.double().mean().item())


def corpus_of(path: str) -> Corpus:
    """The text of a run, or python_docs."""
    return read_corpus(
        read_checkpoint(path).configuration(monitor={}).data if path else DataConfig()
    )


@lru_cache(maxsize=1)
def model_and_text(path: str, attention: str, seed: int) -> tuple[CharTransformer, Tensor]:
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


def on_pretrained(case: Case) -> Result:
    """A module of a pretrained model at the inputs that its model gives it."""
    model = pretrained(case.path, case.text)
    texts = sequences(model.tokens, case.num_tokens, case.num_sequences, case.seed)
    where = case.layer, case.part, case.causal
    jacobians = (model.jacobian(*where, text) for text in progress(texts, "texts"))
    return joined([estimate(jacobian, case.seed, PRETRAINED_RTOL) for jacobian in jacobians])


def on_text(case: Case) -> Result:
    """A layer at the inputs that its model gives it, or one in which every token sees all."""
    model, text = model_and_text(case.path, case.part, case.seed)
    with torch.no_grad(), layer_inputs(model) as found:
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


def attack(case: Case, seed: int) -> Result:
    """The paper's two clusters, made for one dot-product head; L2 takes the worst of more radii."""
    *maps, w_o, clusters = random_layer(seed)
    w_q, w_k, w_v = (w[:1] for w in maps) if case.attacked == "head" else maps
    x = case.radius * clusters[[0] + [1] * (case.num_tokens - 1)][None]
    if case.part == "dot_product":
        out = w_o if case.attacked == "layer" else None
        f = partial(dot_product, w_q=w_q, w_k=w_k, w_v=w_v, w_o=out, causal=case.causal)
        return estimate(linearise(f, x), seed)
    # The value path of tied L2 has the factor W^Q W^Qᵀ/√d, tiny for small weights: scaled to one.
    d_head = w_q.shape[-1]
    size = torch.linalg.matrix_norm(w_q[0], 2).square() / math.sqrt(d_head)
    g = paper_output_map(w_q, w_v, torch.eye(d_head, GPT2_WIDTH, dtype=DTYPE)) / size
    jacobians = (linearise(lambda z: tied_attention(z, w_q, g), s * x) for s in L2_RADII)
    return max((estimate(j, seed) for j in jacobians), key=lambda result: result.constants)


@lru_cache(maxsize=16)
def random_layer(seed: int) -> tuple[Tensor, ...]:
    """W^Q, W^K, W^V (H, D, d) and W^O (D, D) as GPT-2 initialises them, and clusters at R = 1.

    The clusters are those of head 0, the lone token first.
    """
    generator = torch.Generator().manual_seed(seed)
    maps, w_o = (
        torch.randn(GPT2_WIDTH, count * GPT2_WIDTH, generator=generator, dtype=DTYPE)
        for count in (3, 1)
    )
    w_q, w_k, w_v = (split_heads(GPT2_INIT * w, GPT2_HEADS) for w in maps.chunk(3, dim=1))
    a = w_k[0] @ w_q[0].mT / math.sqrt(w_q.shape[-1])  # has the eigenvalue 0, so a real one
    return w_q, w_k, w_v, GPT2_PROJECTION * w_o, castin.two_cluster_tokens(a, 1.0, 2)


def dot_product(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor | None, causal: bool
) -> Tensor:
    """f(X) = [softmax(Q_h K_hᵀ/√d) V_h]_h W^O; without W^O in the first H d channels."""
    q, k, v = (project(x, w) for w in (w_q, w_k, w_v))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        logits = logits + torch.full_like(logits[0, 0], -math.inf).triu(1)
    y = merge_heads(logits.softmax(-1) @ v)
    return nn.functional.pad(y, (0, x.shape[-1] - y.shape[-1])) if w_o is None else y @ w_o


Part = Rows[Case, Result]  # one curve, by growing n


def label(case: Case) -> str:
    """A curve in words."""
    part, mask = case.part.replace("_", " "), "causal" if case.causal else "unmasked"
    if case.text:
        return f"{part} {case.layer}, {mask}"
    if case.attacked:
        of = {"head": "one head", "heads": "heads", "layer": "heads and projection"}[case.attacked]
        sign = "≤" if case.part == "l2" else "="  # L2 takes the worst of smaller radii
        return f"GPT-2's {part} at initialisation, {of}, {mask}, R {sign} {case.radius:g}"
    return f"{'checkpoint' if case.path else 'small'} {part} layer {case.layer}, {mask}"


def fits(rows: Rows[Case, Result]) -> list[tuple[Part, Fit | None]]:
    """Every curve over n, with its fit if there are enough lengths: in n − 1 in unmasked attacks.

    Where all others follow the lone token the constant is √(n − 1), by Prop. 3.4, which would look
    like n^0.53 at these lengths; under a mask the lone token, too, sees itself alone, hence √n.
    """
    found = []
    for curve in by(rows, lambda case, _: label(case)).values():
        part = sorted(curve, key=lambda row: row[0].num_tokens)
        others = part[0][0].attacked != "" and not part[0][0].causal
        points = [(c.num_tokens - others, r.constants) for c, r in part]
        found.append((part, fit(points, "(n-1)" if others else "n")))
    return found


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every curve and its fit; a claim only where the paper measured the same."""
    found = fits(rows)
    lines = [
        {"layer": label(part[0][0]), "fit": one and str(one)}
        | {f"n = {c.num_tokens}": r.mean for c, r in part}
        for part, one in found
    ]
    fitted = [(part, one) for part, one in found if one]
    if not rows[0][0].text:
        return Summary(lines, [words for part, one in fitted for words in claims(part, one)])
    kinds = by(fitted, lambda part, _: title(part[0][0]))
    return Summary(lines, [of_kind(kind, [f for _, f in some]) for kind, some in kinds.items()])


def of_kind(kind: str, found: list[Fit]) -> Finding:
    """The exponents of all layers of a pretrained model, beside ½ and what the paper observed."""
    exponents = [one.exponent for one in found]
    below = sum(one.high < 0.5 for one in found)
    observed = sum(one.low <= ON_TEXT <= one.high for one in found)
    words = (
        f"{kind}: exponents {min(exponents):.2f} to {max(exponents):.2f} in {len(found)} layers; "
        f"the interval ends below 1/2 in {below} and holds the paper's {ON_TEXT:g} in {observed}"
    )
    return None if kind.startswith(BLOCK) else below == len(found), words


def claims(part: Part, one: Fit) -> list[Finding]:
    """The fit in words, and whether exponent and coefficient are the paper's."""
    case = part[0][0]
    words = f"{label(case)}: {one}"
    if case.attacked not in ("heads", "layer"):
        return [(None, words)]
    # C of C √n, least squares in logarithms, as the paper gives it
    logs = (math.log(x) - math.log(c.num_tokens) / 2 for c, r in part for x in r.constants)
    coefficient = math.exp(fmean(logs))
    size = f"{label(case)}: C of C n^(1/2) {coefficient:.3g}, the paper's layer {PUBLISHED_C:g}"
    if case.attacked == "heads":
        return [(None, words), (None, size)]
    near = abs(one.exponent - 0.5) <= EXPONENT_TOLERANCE
    ratio = max(coefficient / PUBLISHED_C, PUBLISHED_C / coefficient)
    return [(near, words), (ratio <= COEFFICIENT_FACTOR, size)]


def title(case: Case) -> str:
    """The axes of a curve."""
    if case.text:
        return f"{case.part}, {'causal' if case.causal else 'unmasked'}"
    return "two clusters" if case.attacked else "text"


def draw(rows: Rows[Case, Result]) -> Figure:
    """Constants against n: on text and under attack, or by module and mask."""
    titles = list(by(rows, lambda case, _: title(case)))
    num_rows = len(by(rows, "causal")) if rows[0][0].text else 1
    figure, axes = panels(num_rows, len(titles) // num_rows)
    for index, (part, _) in enumerate(fits(rows)):
        case = part[0][0]
        look = look_of(case.layer if case.text else index)
        one = axes[titles.index(title(case))]
        curves(one, part, "num_tokens", "mean", label=label(case), **look)
    for one, words in zip(axes, titles, strict=True):
        one.set(
            xlabel="sequence length n (tokens)", xscale="log", yscale="log",
            ylabel="local constant, frobenius (no unit)", title=words,
        )  # fmt: skip
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
