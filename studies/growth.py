"""Castin et al. 2024, Fig. 1: the local constant of attention layers against sequence length.

‖Df(X)‖ (frobenius) of one multi-head attention layer f with its output map, by power iteration, at
the inputs that real text gives it, and at the paper's adversarial two-cluster tokens; the exponent
of C nᵅ, or C (n − 1)ᵅ under attack, is fitted with a bootstrap interval. Tied L2 attention is put
under the same attack.

``model=small``        layers of ours at initialisation: dot product, tied L2, contractive L2
``model=checkpoint``   a trained model of ours (checkpoint=RUN_FOLDER), on its own test text
``model=two_cluster``  the attack alone, on random weights of GPT-2's shape

Every layer is measured bare and in float64. The paper's layers are those of GPT-2 and BERT; without
their weights only its attack on GPT-2 at initialisation (layer 6) can be held against ours, made on
independent weights of the same normal distribution.

What counts: reproduced means that all heads of the attacked layer, at the published R, have an
exponent within 0.05 of ½ and C within a factor of two of the paper's. One head alone is √(n − 1)
for any weights (Prop. 3.4) and checks the code; layers on text, other R and tied L2 (whose exponent
below ¼ is called no growth) are not in the paper. Without the attack there is no claim.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.assemble.model import trained_configuration
from invformer.config.section import option
from invformer.errors import ConfigurationError, DataError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.lipschitz.power_iteration import operator_norm
from invformer.numerics.linear_map import LinearMap, linearise
from studies import castin
from studies.layer_bounds import jacobian_of, tied_attention
from studies.measured_layers import (
    DTYPE,
    GPT2_INIT,
    SMALL_CONTEXT,
    Weights,
    digest_of_text,
    layer_of,
    random_weights,
    small_config,
    source,
    tied_weights,
    unmasked_jacobian,
)
from studies.power_law import Fit, fit
from studies.report import (
    Figure,
    Finding,
    Rows,
    Summary,
    by,
    curves,
    judged,
    look_of,
    mean,
    outcome_of,
    panels,
    values,
)
from studies.study import Study, StudyOptions, case_of, program

Model = Literal["small", "checkpoint", "two_cluster"]
Attention = Literal["dot_product", "l2", "contractive_l2"]
Data = Literal["text", "two_cluster"]

OURS: tuple[Attention, ...] = ("dot_product", "l2", "contractive_l2")
L2_RADII = tuple(2.0**k for k in range(-8, 1))  # L2 is attacked at all of these, in units of R
RANDOM_WEIGHTS = "random_weights"  # N(0, 0.02²), of GPT-2's shape: no network, no layer
IN_WORDS = f"random N(0, {GPT2_INIT}²) weights of GPT-2's shape"
PUBLISHED_RADIUS, PUBLISHED_C = 100.0, 0.92  # C n^(1/2) of all heads, the attack made for head 0
IN_PAPER = (
    "GPT-2 at initialisation, layer 6, all heads, attack made for head 0, R = 100: 0.92 n^0.5"
)
EXPONENT_TOLERANCE = 0.05  # of the attack's 1/2
COEFFICIENT_FACTOR = 2.0  # between the paper's C and ours
NO_GROWTH = 0.25  # an exponent below it is not the attack's 1/2


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Growth of the local Lipschitz constant with the sequence length, on text and under attack."""

    model: Model = option("small", "whose layers are measured")
    checkpoint: str | None = option(None, "run folder, for model=checkpoint")
    text: str | None = option(None, "a text file or folder; null is python_docs, or a run's own")
    sizes: list[int] = option([4, 8, 16, 32, 64, 96], "n on text, tokens", "[2, 1e5]")
    num_sequences: int = option(4, "texts per n, the same starts for all n", "[1, 1e4]")
    layers: list[int] = option([], "from 0 on; [] is the first and the middle one", "[0, 1e4]")
    attack_sizes: list[int] = option([7, 17, 32, 47, 62, 77, 97], "n under attack", "[2, 1e5]")
    attack_factors: list[float] = option([1.0, 10.0], "radii of the paper's attack", "(0, 1e6]")
    max_steps: int = option(200, "power iteration steps at most", "[1, 1e5]")
    rtol: float = option(1e-4, "residual that counts as converged", "(0, 1)")

    def check(self) -> None:
        """A checkpoint is named exactly where it is used."""
        if (self.model == "checkpoint") != (self.checkpoint is not None):
            self.refuse("checkpoint", "set it together with model=checkpoint, and only then")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer at one length.

    ``path`` are the weights of the model and ``digest`` their content, as ``sha256`` is that of the
    text; ``radius`` is R for ``two_cluster``, 0 on text; ``alone`` measures the attacked head only.
    """

    model: str
    path: str = ""
    digest: str = ""
    attention: Attention
    layer: int = 0
    causal: bool = False
    data: Data
    num_tokens: int
    alone: bool = False
    radius: float = 0.0
    num_sequences: int
    text: str
    sha256: str = ""
    max_steps: int
    rtol: float
    seed: int


@dataclass(frozen=True)
class Result:
    """‖Df(X)‖ in ``frobenius`` from below, per sequence; ``converged`` is the share within rtol."""

    constants: list[float]
    converged: float


# --- cases ---------------------------------------------------------------------------------------


def cases(options: Options) -> list[Case]:
    """Lengths on text, then the attack on random weights."""
    model, path = options.model, options.checkpoint or ""
    attentions, num_layers, context = resolve(options)
    layers = options.layers or sorted({0, num_layers // 2})
    if attentions and max(layers) >= num_layers:
        options.refuse("layers", f"{max(layers)} does not exist: {model} has {num_layers} layers")
    sizes = [n for n in options.sizes if n <= context]
    if len(sizes) < len(options.sizes):
        print(f"growth: {model} takes at most {context} tokens; longer sizes are left out")
    masks = [True] if path else [True, False]  # unmasked, a trained layer would lose its bias
    text = options.text or ""
    digest = read_checkpoint(path).sha256[:16] if path else ""
    sha256 = digest_of_text(model, path, text) if attentions else ""
    curves = [
        case_of(
            Case, options, path=path, digest=digest, text=text, sha256=sha256, data="text",
            attention=attention, layer=layer, causal=causal, num_tokens=n,
        )
        for attention in attentions
        for layer in layers
        for causal in masks
        for n in sizes
    ]  # fmt: skip
    kinds: list[tuple[Attention, bool, float]] = [
        ("dot_product", True, 1.0),
        *(("dot_product", False, factor) for factor in options.attack_factors),
        ("l2", True, 1.0),
    ]
    attacks = [
        case_of(
            Case, options, model=RANDOM_WEIGHTS, text="", num_sequences=1, data="two_cluster",
            attention=attention, num_tokens=n, alone=alone, radius=factor * PUBLISHED_RADIUS,
        )
        for attention, alone, factor in kinds
        for n in options.attack_sizes
    ]  # fmt: skip
    return [*curves, *attacks]


def resolve(options: Options) -> tuple[tuple[Attention, ...], int, int]:
    """The attentions that are measured on text, the number of layers, and the longest input."""
    if options.model == "two_cluster":
        return (), 1, SMALL_CONTEXT
    if options.checkpoint is None:
        return OURS, small_config("dot_product").num_layers, SMALL_CONTEXT
    trained = trained_configuration(read_checkpoint(options.checkpoint))
    name = trained.model.name
    if name not in OURS:
        raise ConfigurationError(
            f"checkpoint: the growth of {name} is not studied; take one with {', '.join(OURS)}"
        )
    attention = OURS[OURS.index(name)]  # the same string, of the narrower type
    return (attention,), trained.model.num_layers, trained.data.seq_len


# --- measuring -----------------------------------------------------------------------------------


def measure(case: Case, device: torch.device) -> Result:
    """The layer at its texts, or under attack; small matrices, so always on the CPU."""
    del device
    if case.data == "two_cluster":
        return attack(case)
    network, text = source(case.model, case.path, case.attention, case.text, case.seed)
    tokens = sequences(text, case.num_tokens, case.num_sequences, case.seed)
    jacobian = jacobian_of if case.causal else unmasked_jacobian
    return estimate(jacobian(*layer_of(network, tokens, case.layer)), case)


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
            "choose fewer num_sequences, smaller sizes or another text"
        )
    share = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    starts = room * torch.arange(count) + (share * (room // 2)).long()
    return tokens[starts[:, None] + torch.arange(num_tokens)]


def estimate(jacobian: LinearMap, case: Case) -> Result:
    """‖Df(X)‖ of every sequence."""
    found = operator_norm(
        jacobian, "frobenius", num_steps=case.max_steps, rtol=case.rtol, seed=case.seed
    )
    return Result(found.value.tolist(), found.converged.double().mean().item())


def attack(case: Case) -> Result:
    """The paper's two clusters, made for one dot-product head; L2 takes the worst of more radii."""
    weights = random_weights(case.seed)
    q, k = weights.w_q[0], weights.w_k[0]
    try:
        a = k @ q.mT / math.sqrt(q.shape[-1])
        x = castin.two_cluster_tokens(a, case.radius, case.num_tokens)[None]
    except ValueError as error:
        raise ConfigurationError(f"seed: {error}; choose another seed") from None
    if case.alone:  # its channels are written to the first of the output
        w_o = torch.eye(weights.w_v.shape[-1], weights.w_v.shape[-2], dtype=DTYPE)
        weights = Weights(weights.w_q[:1], weights.w_k[:1], weights.w_v[:1], w_o)
    if case.attention == "dot_product":
        return estimate(linearise(weights, x), case)
    tied = tied_weights(weights)
    jacobians = (linearise(lambda z: tied_attention(z, *tied), s * x) for s in L2_RADII)
    found = (estimate(jacobian, case) for jacobian in jacobians)
    return max(found, key=lambda result: result.constants)


# --- fits and verdict ----------------------------------------------------------------------------

CURVE = ("model", "attention", "layer", "causal", "data", "alone", "radius")
Part = Rows[Case, Result]


def label(case: Case) -> str:
    """A curve in words."""
    attention = case.attention.replace("_", " ")
    if case.data == "two_cluster":
        radius = f"R {'≤' if case.attention == 'l2' else '='} {case.radius:g}"
        heads = "one head" if case.alone else "all heads"
        return f"{IN_WORDS}, {attention}, {heads}, {radius}"
    mask = "causal" if case.causal else "unmasked"
    return f"{case.model} {attention} layer {case.layer}, {mask}"


def is_published(case: Case) -> bool:
    """Whether the paper measured what stands here: all heads, at its own R."""
    is_attack = case.data == "two_cluster" and case.attention == "dot_product"
    return is_attack and not case.alone and case.radius == PUBLISHED_RADIUS


def fits(rows: Rows[Case, Result]) -> list[tuple[Part, Fit | None]]:
    """Every curve over n, with its fit if there are enough lengths: in n − 1 under attack.

    Prop. 3.4 has √(n − 1): fitted in n it would look like n^0.53 at these lengths, for any weights.
    """
    parts = [sorted(part, key=lambda row: row[0].num_tokens) for part in by(rows, *CURVE).values()]
    return [
        (
            part,
            fit([(c.num_tokens, r.constants) for c, r in part], others=bool(part[0][0].radius)),
        )
        for part in parts
    ]


def constant(case: Case, result: Result) -> float:
    """The mean constant of the sequences."""
    return fmean(result.constants)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every fitted curve beside the paper's."""
    found = fits(rows)
    lines = [table_line(part, one) for part, one in found]
    fitted = [(part, one) for part, one in found if one is not None]
    if not fitted:
        return judged([], lines, "C n^alpha", "an exponent needs at least three lengths")
    findings = [attack_finding(part, one) for part, one in fitted if part[0][0].radius]
    if slower := [one.exponent < 0.5 for part, one in fitted if not part[0][0].radius]:
        share = f"{sum(slower)} of {len(slower)}"
        words = f"{share} curves on text grow slower than n^(1/2); none is of the paper's layers"
        findings.append((None, f"{words}, whose exponent is about 1/4"))
    why = "; ".join(words for _, words in findings)
    why += f"; at least {min(values(rows, 'converged')):.0%} of the estimates of each row converged"
    ours = "; ".join(f"{label(part[0][0])}: {one}" for part, one in fitted)
    published = any(is_published(part[0][0]) for part, _ in fitted)
    paper = IN_PAPER if published else "about n^(1/4) on text"
    return Summary(lines, paper, ours, outcome_of(findings), why)


def attack_finding(part: Part, one: Fit) -> Finding:
    """What an attack did; a claim only where the paper measured the same."""
    case, exponent = part[0][0], f"exponent {one.interval} in n-1"
    if case.attention == "l2":
        grows = "shows no such growth" if one.exponent < NO_GROWTH else "grows too"
        rule = f"no growth is an exponent below {NO_GROWTH}"
        return None, f"tied L2 {grows}: {exponent} at its worst radius ({rule})"
    if case.alone:
        return None, f"one head: {exponent}, which Prop. 3.4 gives for any weights"
    coefficient = root_coefficient(part)
    measured = f"{exponent}, C of C n^(1/2) {coefficient:.3g}"
    if not is_published(case):
        return None, f"all heads at R = {case.radius:g}, not in the paper: {measured}"
    ratio = max(coefficient / PUBLISHED_C, PUBLISHED_C / coefficient)
    holds = abs(one.exponent - 0.5) <= EXPONENT_TOLERANCE and ratio <= COEFFICIENT_FACTOR
    return holds, (
        f"all heads {'reproduced' if holds else 'not reproduced'}: {measured}, the paper's "
        f"{PUBLISHED_C:g} (asked: within {EXPONENT_TOLERANCE} of 1/2, and C within a factor of "
        f"{COEFFICIENT_FACTOR:g})"
    )


def table_line(part: Part, one: Fit | None) -> dict[str, Any]:
    """One curve: fit, the paper's fit, and the largest length."""
    case, result = part[-1]
    return {
        "layer": label(case),
        "fit": one and str(one),
        "C of C n^(1/2)": root_coefficient(part) if case.radius else None,
        "paper": f"{PUBLISHED_C:g} n^0.5" if is_published(case) else None,
        "largest n": case.num_tokens,
        "constant there": constant(case, result),
        "converged": min(values(part, "converged")),
    }


def root_coefficient(part: Part) -> float:
    """C of C √n through a curve, least squares in logarithms: what the paper gives for attacks."""
    return math.exp(mean(part, lambda c, r: math.log(constant(c, r) / math.sqrt(c.num_tokens))))


def draw(rows: Rows[Case, Result]) -> Figure:
    """Constants against n, on text and under attack, with the paper's line."""
    figure, panes = panels(1, 2)
    for axes, data in zip(panes, get_args(Data), strict=True):
        chosen = [row for row in rows if row[0].data == data]
        for index, (part, one) in enumerate(fits(chosen)):
            words = label(part[0][0]) if one is None else f"{label(part[0][0])}:\n{one}"
            curves(axes, part, "num_tokens", constant, label=words, **look_of(index))
            if is_published(part[0][0]):
                n = values(part, "num_tokens")
                axes.plot(n, [PUBLISHED_C * m**0.5 for m in n], "k:", label="paper 0.92 n^0.5")
        axes.set(
            xlabel="sequence length n (tokens)", xscale="log", yscale="log",
            ylabel="local constant, frobenius (no unit)", title=data.replace("_", " "),
        )  # fmt: skip
        if chosen:
            axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
