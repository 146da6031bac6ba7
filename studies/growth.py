"""Castin et al. 2024, Fig. 1: the local constant of attention layers against sequence length.

‖Df(X)‖ (frobenius) of one multi-head attention layer f with its output map, by Golub–Kahan, at the
inputs that real text gives it, and at the paper's adversarial two-cluster tokens; the exponent of
C nᵅ, or C (n − 1)ᵅ under attack, is fitted with a bootstrap interval. Three more views: the
constant of scaled inputs s X, the token magnitude (mean_i ‖x_i‖²)^½ against n, and tied L2
attention under the same attack.

``model=small``        layers of ours at initialisation: dot product, tied L2, contractive L2
``model=checkpoint``   a trained model of ours (checkpoint=RUN_FOLDER), on its own test text
``model=random_gpt2``, ``random_bert``   published size, random weights
``model=gpt2``, ``bert``   published weights, from the Hub or model_path=FOLDER
``model=two_cluster``  the attack alone, on random weights of GPT-2's shape

The four with GPT-2 and BERT need ``transformers`` (pip install -e .[pretrained]) to be what they
say; without it, or without weights, one line says what runs instead. Random networks read words
numbered by their frequency. Departures from the paper: every layer is measured bare (no residual,
no LayerNorm, no dropout), and an unmasked layer and a masked one see the same inputs. Each layer is
evaluated in float64, the network before it in its own precision.

The attack is made for one head. Alone, that head must follow Prop. 3.4, √(n − 1) and not √n. With
all heads of its layer concatenated it is what the paper's script measures, and what the published
C n^½ is of: at the published R and, since heads that the tokens were not made for need more to
become one-hot, at multiples of it (``attack_factors``). The paper attacks a layer of GPT-2; models
without published attack get independent weights from the same normal distribution instead. What
counts as reproduced is in the verdict: exponents within 0.05 of ½ for one head and, with C within a
factor of two, for all heads at the published R; for L2 attention an exponent below ¼.
"""

# ruff: noqa: RUF009  # option() returns a dataclass field

import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.assemble.saved_model import trained_configuration
from invformer.config.section import option
from invformer.errors import ConfigurationError, DataError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.lipschitz.power_iteration import LipschitzEstimate, lanczos_estimate
from invformer.nn.attention import attention_jacobian, merge_heads, paper_output_map, project
from invformer.numerics.linear_map import LinearMap, SequenceMap, linearise
from studies import castin
from studies.measured_layers import (
    DTYPE,
    GPT2_HEADS,
    GPT2_INIT,
    GPT2_WIDTH,
    SMALL_CONTEXT,
    DotProduct,
    TiedL2,
    digest_of_text,
    digest_of_weights,
    head_matrices,
    hub_weights,
    network,
    small_config,
    source,
)
from studies.power_law import Fit, fit
from studies.study import (
    Outcome,
    Rows,
    Study,
    StudyOptions,
    Summary,
    main,
    panels,
)

if TYPE_CHECKING:
    from invformer.training.plots import Axes, Figure

Model = Literal["small", "checkpoint", "random_gpt2", "random_bert", "gpt2", "bert", "two_cluster"]
Attention = Literal["dot_product", "l2", "contractive_l2"]
Data = Literal["text", "scaled_text", "two_cluster"]
AttackTarget = tuple[str, str, str, int, int, float]  # model, path, digest, layer, head, R
Finding = tuple[bool | None, str]  # whether it holds, None without a claim, and in words

OURS: tuple[Attention, ...] = ("dot_product", "l2", "contractive_l2")
MASK_OF_A_CHECKPOINT = (
    "a checkpoint is measured under its causal mask alone; without it a trained layer would lose "
    "its learned position bias"
)
L2_RADII = tuple(2.0**k for k in range(-8, 1))  # L2 is attacked at all of these, in units of R
PUBLISHED_TEXT = {  # (model, layer, causal): C, alpha of the paper's figures
    ("bert", 0, False): (14.3, 0.24),
    ("bert", 6, False): (6.44, 0.25),
    ("random_gpt2", 6, True): (0.445, 0.25),
    ("gpt2", 0, True): (35.3, 0.26),
    ("gpt2", 6, True): (25.0, 0.51),
}
PUBLISHED_ATTACK = {  # (model, layer): head, R, C of C n^(1/2) of all heads of the layer
    ("bert", 0): (0, 15.5, 4.39),
    ("bert", 6): (7, 21.5, 5.73),
    ("random_gpt2", 6): (0, 100.0, 0.92),
    ("gpt2", 0): (0, 10.0, 46.9),
}
ATTACKED = {  # networks of the published attacks, in words
    "bert": "BERT",
    "random_gpt2": "GPT-2 at initialisation",
    "gpt2": "pretrained GPT-2",
}
RANDOM_WEIGHTS = "random_weights"  # N(0, 0.02²), of GPT-2's shape: no network, no layer
EXPONENT_TOLERANCE = 0.05  # of the attack's 1/2
COEFFICIENT_FACTOR = 2.0  # between the paper's C and ours
NO_GROWTH = 0.25  # an exponent below it is not the attack's 1/2


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Growth of the local Lipschitz constant with the sequence length, on text and under attack."""

    program: ClassVar[str] = "-m studies.growth"
    paper: ClassVar[Mapping[str, Any]] = {
        "sizes": list(range(2, 100, 2)),
        "attack_sizes": list(range(7, 100, 5)),  # n = 2, also published, has no power law yet
        "num_sequences": 10,
    }
    model: Model = option("small", "whose layers are measured")
    checkpoint: str | None = option(None, "run folder, for model=checkpoint")
    model_path: str | None = option(None, "folder or Hub name of the weights, for gpt2 and bert")
    text: str | None = option(None, "a text file or folder; null is python_docs, or a run's own")
    sizes: list[int] = option([4, 8, 16, 32, 64, 96], "n on text, tokens", within="[2, 1e5]")
    num_sequences: int = option(4, "texts per n, the same starts for all n", within="[1, 1e4]")
    layers: list[int] = option(
        [], "layers, counted from 0; [] is the first and the middle one", within="[0, 1e4]"
    )
    mask: Literal["both", "causal", "none"] = option(
        "both", "of the measured layers, on text; a checkpoint has causal alone"
    )
    scales: list[float] = option(
        [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0],
        "factors on the inputs, first layer only, no unit", within="(0, 1e9]",
    )  # fmt: skip
    scale_tokens: int = option(32, "n for the factors, tokens", within="[2, 1e5]")
    attack_sizes: list[int] = option(
        [7, 17, 32, 47, 62, 77, 97], "n of the two-cluster attack, tokens", within="[2, 1e5]"
    )
    attack_factors: list[float] = option(
        [1.0, 10.0], "radii of the attack on all heads, in units of the paper's", within="(0, 1e6]"
    )
    max_steps: int = option(200, "Lanczos steps at most", within="[1, 1e5]")
    rtol: float = option(1e-4, "Lanczos residual that counts as converged", within="(0, 1)")

    def check(self) -> None:
        """A checkpoint is named exactly where it is used."""
        if (self.model == "checkpoint") != (self.checkpoint is not None):
            self.refuse("checkpoint", "set it together with model=checkpoint, and only then")
        if self.model_path is not None and self.model not in ("gpt2", "bert"):
            self.refuse("model_path", "is for model=gpt2 and model=bert")
        if self.model == "checkpoint" and self.mask == "none":
            self.refuse("mask", MASK_OF_A_CHECKPOINT)


@dataclass(frozen=True)
class Case:
    """One layer at one length.

    ``model`` is what really runs, ``path`` its weights if any and ``digest`` their content, as
    ``sha256`` is that of the text; ``radius`` is R for ``two_cluster``, 0 on text; ``alone``
    measures no head but the attacked one. ``scaled_text`` is the view of factors, whose length and
    scale 1 belong to no curve over n.
    """

    model: str
    path: str
    digest: str
    attention: Attention
    layer: int
    causal: bool
    data: Data
    num_tokens: int
    scale: float
    head: int
    alone: bool
    radius: float
    num_sequences: int
    text: str
    sha256: str
    max_steps: int
    rtol: float
    seed: int


@dataclass(frozen=True)
class Result:
    """Local constants in ``frobenius``, one per sequence.

    Attributes:
        constants: ‖Df(X)‖, from below.
        magnitudes: (mean_i ‖x_i‖²)^½ of the layer's inputs.
        converged: share of the sequences whose residual is at most rtol.
        ceiling: √n Σ_h ‖V_h‖, which ‖Df(s X)‖ cannot exceed as s → ∞; NaN for L2 attention.
    """

    constants: list[float]
    magnitudes: list[float]
    converged: float
    ceiling: float


# --- cases ---------------------------------------------------------------------------------------


def cases(options: Options) -> list[Case]:
    """Lengths on text, then factors, then the attack."""
    model, path, attentions, num_layers, context = resolve(options)
    layers = options.layers or sorted({0, num_layers // 2})
    if options.model != "two_cluster" and max(layers) >= num_layers:
        options.refuse("layers", f"{max(layers)} does not exist: {model} has {num_layers} layers")
    sizes = [n for n in options.sizes if n <= context]
    if len(sizes) < len(options.sizes):
        print(f"growth: {model} takes at most {context} tokens; longer sizes are left out")
    masks = {"both": [True, False], "causal": [True], "none": [False]}[options.mask]
    if model == "checkpoint":
        masks = [True]
        if options.mask == "both":
            print(f"growth: mask: {MASK_OF_A_CHECKPOINT}")

    text, digest = options.text or "", digest_of_weights(model, path, options.seed)
    sha256 = digest_of_text(model, path, text) if attentions else ""  # an attack reads no text

    def on_text(
        data: Data, attention: Attention, layer: int, causal: bool, n: int, scale: float
    ) -> Case:
        return Case(
            model, path, digest, attention, layer, causal, data, n, scale, 0, False, 0.0,
            options.num_sequences, text, sha256, options.max_steps, options.rtol, options.seed,
        )  # fmt: skip

    scale_tokens = min(options.scale_tokens, context)
    chosen = [
        on_text("text", attention, layer, causal, n, 1.0)
        for attention in attentions
        for layer in layers
        for causal in masks
        for n in sizes
    ]
    chosen += [
        on_text("scaled_text", attention, layers[0], masks[0], scale_tokens, scale)
        for attention in attentions
        for scale in options.scales
    ]
    return [*chosen, *attack_cases(options, model, path, digest, layers)]


def attack_cases(
    options: Options, model: str, path: str, digest: str, layers: Sequence[int]
) -> list[Case]:
    """The published attacks on the model's layers; random weights where there are none."""
    random: AttackTarget = (RANDOM_WEIGHTS, "", "", 0, *PUBLISHED_ATTACK["random_gpt2", 6][:2])
    targets: list[AttackTarget] = [
        (model, path, digest, layer, *PUBLISHED_ATTACK[model, layer][:2])
        for layer in layers
        if (model, layer) in PUBLISHED_ATTACK
    ] or [random]

    def attacked_by(
        attention: Attention, alone: bool, factor: float, target: AttackTarget
    ) -> list[Case]:
        name, place, content, layer, head, radius = target
        return [
            Case(
                name, place, content, attention, layer, False, "two_cluster", n, 1.0, head, alone,
                factor * radius, 1, "", "", options.max_steps, options.rtol, options.seed,
            )
            for n in options.attack_sizes
        ]  # fmt: skip

    chosen = []
    for target in targets:
        chosen += attacked_by("dot_product", True, 1.0, target)
        for factor in options.attack_factors:
            chosen += attacked_by("dot_product", False, factor, target)
    return chosen + attacked_by("l2", True, 1.0, random)


def resolve(options: Options) -> tuple[str, str, tuple[Attention, ...], int, int]:
    """What runs: its name, its weights, its attentions, its number of layers, its longest input."""
    match options.model:
        case "two_cluster":
            return "two_cluster", "", (), 1, SMALL_CONTEXT
        case "small":
            return "small", "", OURS, small_config("dot_product").num_layers, SMALL_CONTEXT
        case "checkpoint":
            assert options.checkpoint is not None
            trained = trained_configuration(read_checkpoint(options.checkpoint))
            attention = trained.model.name
            if attention == "contractive_bounded":
                raise ConfigurationError(
                    f"checkpoint: {options.checkpoint} has attention in the unit ball, whose "
                    f"growth is not studied; take one with {', '.join(OURS)}"
                )
            place, layers = options.checkpoint, trained.model.num_layers
            return "checkpoint", place, (attention,), layers, trained.data.seq_len
    name, path = available(options)
    config = network(name, path, options.seed)[1]
    return name, path, ("dot_product",), config.num_layers, config.context


def available(options: Options) -> tuple[str, str]:
    """The network of the ``transformers`` kind that can be had here, and where its weights are."""
    name = options.model
    if importlib.util.find_spec("transformers") is None:
        instead = f"{name.removeprefix('random_')}_shape"
        if not name.startswith("random_"):
            instead = "small_shape"
        print(
            f"growth: transformers is not installed (pip install -e .[pretrained]); model={name} "
            f"becomes {instead}, random weights in our own pre-norm dot-product layers"
        )
        return instead, ""
    if name.startswith("random_"):
        return name, ""
    path = options.model_path or {"gpt2": "gpt2", "bert": "bert-base-uncased"}[name]
    try:
        network(name, path, options.seed)
    except Exception as error:  # the Hub's client has many ways to fail
        reason = " ".join(str(error).split())[:120]
        print(f"growth: no weights for {name} at {path} ({reason}); running small_{name}, random")
        return f"small_{name}", ""
    return name, path


# --- measuring -----------------------------------------------------------------------------------


def measure(case: Case, device: torch.device) -> Result:
    """The layer at its texts, or under attack."""
    if case.data == "two_cluster":
        return attack(case, device)
    network_text = source(case.model, case.path, case.attention, case.text, case.seed)
    tokens = sequences(network_text.tokens, case.num_tokens, case.num_sequences, case.seed)
    layer = network_text.layer(tokens, case.layer)
    x = case.scale * layer.inputs.to(device)
    bias = layer.bias if case.causal else torch.zeros_like(layer.bias)
    weights = moved(layer.weights, device)
    estimate = constant(jacobian(weights, x, bias.to(device)), case)
    return as_result(estimate, x, ceiling(weights, case.num_tokens))


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
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(count, generator=generator)
    starts = room * torch.arange(count) + (share * (room // 2)).long()
    return tokens[starts[:, None] + torch.arange(num_tokens)]


def jacobian(weights: DotProduct | TiedL2, x: Tensor, bias: Tensor) -> LinearMap:
    """Df(X), analytically for L2 attention, by differentiation for dot products."""
    if isinstance(weights, TiedL2):
        return attention_jacobian(x, weights.w_q, weights.g, bias)
    return linearise(dot_product_map(weights, bias), x)


def dot_product_map(weights: DotProduct, bias: Tensor) -> SequenceMap:
    """f(X) = [softmax(Q_h K_hᵀ/√d + b) V_h]_h W^O, without value and output biases."""

    def attend(x: Tensor) -> Tensor:
        q, k, v = (project(x, w) for w in weights[:3])
        q = q if weights.b_q is None else q + weights.b_q
        k = k if weights.b_k is None else k + weights.b_k
        y = merge_heads((q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v)
        return y if weights.w_o is None else y @ weights.w_o

    return attend


def constant(linear: LinearMap, case: Case) -> LipschitzEstimate:
    """‖Df(X)‖ from below."""
    generator = torch.Generator(device=linear.device).manual_seed(case.seed)
    return lanczos_estimate(
        linear, max_steps=case.max_steps, rtol=case.rtol, check_every=5, generator=generator
    )


def as_result(estimate: LipschitzEstimate, x: Tensor, ceiling: float) -> Result:
    """The estimates of all sequences as plain numbers."""
    return Result(
        estimate.value.tolist(),
        x.square().sum(-1).mean(-1).sqrt().tolist(),
        estimate.converged.double().mean().item(),
        ceiling,
    )


def ceiling(weights: DotProduct | TiedL2, num_tokens: int) -> float:
    """√n Σ_h ‖W^V_h W^O_h‖ (Theorem 3.7 with Lemma 3.8)."""
    if isinstance(weights, TiedL2):
        return math.nan
    inner = torch.linalg.qr(weights.w_v).R
    if weights.w_o is not None:
        w_o = weights.w_o.unflatten(0, (len(inner), -1))
        inner = inner @ torch.linalg.qr(w_o.mT).R.mT
    return math.sqrt(num_tokens) * torch.linalg.matrix_norm(inner, 2).sum().item()


def moved(weights: DotProduct | TiedL2, device: torch.device) -> DotProduct | TiedL2:
    """The weights on a device."""
    there: Any = (w if w is None else w.to(device) for w in weights)
    return type(weights)(*there)


def attack(case: Case, device: torch.device) -> Result:
    """The paper's two clusters, made for one dot-product head; L2 takes the worst of more radii."""
    weights = moved(attacked(case.model, case.path, case.layer, case.seed), device)
    assert isinstance(weights, DotProduct)
    q, k = weights.w_q[case.head], weights.w_k[case.head]
    a = k @ q.mT / math.sqrt(q.shape[-1])
    x = real_two_clusters(a, case.radius, case.num_tokens)[None]
    bias = x.new_zeros(1, case.num_tokens, case.num_tokens)
    weights = only_head(weights, case.head) if case.alone else weights._replace(w_o=None)
    if case.attention == "dot_product":
        estimate = constant(jacobian(weights, x, bias), case)
        return as_result(estimate, x, ceiling(weights, case.num_tokens))
    tied = tied_weights(weights)
    results = [
        as_result(constant(jacobian(tied, s * x, bias), case), s * x, math.nan) for s in L2_RADII
    ]
    return max(results, key=lambda result: result.constants)


def only_head(weights: DotProduct, head: int) -> DotProduct:
    """One head, its channels written to the first of the output."""
    parts: Any = (w if w is None else w[head : head + 1] for w in weights[:5])
    width, d_head = weights.w_v.shape[1:]
    w_o = torch.eye(d_head, width, dtype=DTYPE, device=weights.w_v.device)
    return DotProduct(*parts, w_o=w_o)


def real_two_clusters(a: Tensor, radius: float, num_tokens: int) -> Tensor:
    """The clusters of Lemma C.7, in one sentence if this head has none.

    Raises:
        ConfigurationError: A has no real eigenvalue.
    """
    try:
        return castin.two_cluster_tokens(a, radius, num_tokens)
    except ValueError as error:
        raise ConfigurationError(f"seed: {error}; choose another seed") from None


@lru_cache(maxsize=1)
def attacked(model: str, path: str, layer: int, seed: int) -> DotProduct:
    """The weights to attack: a layer of GPT-2 or BERT, or random ones of GPT-2's shape."""
    if model != RANDOM_WEIGHTS:
        module, shape = network(model, path, seed)
        return hub_weights(module, shape.num_heads, layer)
    generator = torch.Generator().manual_seed(seed)
    shape = (GPT2_WIDTH, 3 * GPT2_WIDTH)
    parts = GPT2_INIT * torch.randn(shape, generator=generator, dtype=DTYPE)
    return DotProduct(*(head_matrices(w, GPT2_HEADS) for w in parts.chunk(3, dim=1)))


def tied_weights(weights: DotProduct) -> TiedL2:
    """Tied L2 attention of one head with the same W^Q and W^V, made comparable in size.

    Its value path has the factor W^Q W^Qᵀ/√d, tiny for small weights: it is scaled to norm one.
    """
    assert weights.w_o is not None
    d_head = weights.w_q.shape[-1]
    g = paper_output_map(weights.w_q, weights.w_v, weights.w_o.unflatten(0, (-1, d_head)))
    factor = torch.linalg.matrix_norm(weights.w_q, 2).square() / math.sqrt(d_head)
    return TiedL2(weights.w_q, g / factor[:, None, None])


# --- fits and report -----------------------------------------------------------------------------


class Curve(NamedTuple):
    """What shares one line of a figure."""

    model: str
    attention: Attention
    layer: int
    causal: bool
    data: Data
    alone: bool
    radius: float

    @property
    def label(self) -> str:
        """The curve in words."""
        layer = f"{self.model} {self.attention} layer {self.layer}".replace("_", " ")
        if self.model == RANDOM_WEIGHTS:
            attention = self.attention.replace("_", " ")
            layer = f"random N(0, {GPT2_INIT}²) weights of GPT-2's shape, {attention}"
        if self.data != "two_cluster":
            return f"{layer}, {'causal' if self.causal else 'unmasked'}"
        radius = f"R {'≤' if self.attention == 'l2' else '='} {self.radius:g}"
        return f"{layer}, {'one head' if self.alone else 'all heads'}, {radius}"


def curves(rows: Rows[Case, Result]) -> dict[Curve, list[tuple[Case, Result]]]:
    """The rows over n by curve, in the order of n."""
    found: dict[Curve, list[tuple[Case, Result]]] = {}
    for case, result in rows:
        if case.data != "scaled_text":
            key = Curve(
                case.model, case.attention, case.layer, case.causal, case.data, case.alone,
                case.radius,
            )  # fmt: skip
            found.setdefault(key, []).append((case, result))
    return {key: sorted(part, key=lambda row: row[0].num_tokens) for key, part in found.items()}


def fits(rows: Rows[Case, Result]) -> dict[Curve, Fit]:
    """The fit of every curve with enough lengths: in n on text, in n − 1 under attack.

    Prop. 3.4 has √(n − 1): fitted in n it would look like n^0.53 at these lengths, for any weights.
    """
    found = {
        key: fit([(c.num_tokens, r.constants) for c, r in part], others=key.data == "two_cluster")
        for key, part in curves(rows).items()
    }
    return {key: one for key, one in found.items() if one is not None}


def published(key: Curve) -> tuple[float, float] | None:
    """The paper's C and α for a curve; of attacks it has only all heads, at its own R."""
    if key.attention != "dot_product":
        return None
    if key.data == "text":
        return PUBLISHED_TEXT.get((key.model, key.layer, key.causal))
    _, radius, coefficient = PUBLISHED_ATTACK.get(attacked_in_paper(key), (0, math.nan, math.nan))
    return None if key.alone or key.radius != radius else (coefficient, 0.5)


def attacked_in_paper(key: Curve) -> tuple[str, int]:
    """The network and the layer that the paper attacked where an attack of ours stands."""
    return ("random_gpt2", 6) if key.model == RANDOM_WEIGHTS else (key.model, key.layer)


def in_paper(key: Curve, value: tuple[float, float]) -> str:
    """What the paper reports, and what of."""
    power = f"{value[0]:g} n^{value[1]:g}"
    if key.data == "text":
        return f"{key.label}: {power}"
    model, layer = attacked_in_paper(key)
    head, radius, _ = PUBLISHED_ATTACK[model, layer]
    return (
        f"{ATTACKED[model]}, layer {layer}, all heads, attack made for head {head}, "
        f"R = {radius:g}: {power}"
    )


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every fitted curve beside the paper's."""
    found = fits(rows)
    table = [table_line(key, part, found.get(key)) for key, part in curves(rows).items()]
    if not found:
        why = "an exponent needs at least three lengths"
        return Summary(table or [{"curves": 0}], "C n^alpha", "not run", "not in the paper", why)
    ours = "; ".join(f"{key.label}: {one}" for key, one in found.items())
    known = {key: value for key in found if (value := published(key))}
    paper = "; ".join(in_paper(key, value) for key, value in known.items())
    attacks = {key: part for key, part in curves(rows).items() if key.data == "two_cluster"}
    findings: list[Finding] = [
        *(attack_finding(key, part, found[key]) for key, part in attacks.items() if key in found),
        *text_findings({key: one for key, one in found.items() if key.data == "text"}),
    ]
    converged = min(result.converged for _, result in rows)
    sentences = [words for _, words in findings]
    sentences.append(f"at least {100 * converged:.0f} % of the estimates of each row converged")
    has_claim = any(key.attention == "dot_product" for key in attacks if key in found) or known
    held = [holds for holds, _ in findings if holds is not None]
    outcome = outcome_of(held) if has_claim else "not in the paper"
    return Summary(table, paper or "about n^(1/4) on text", ours, outcome, "; ".join(sentences))


def outcome_of(held: Sequence[bool]) -> Outcome:
    """All claims, some or none."""
    if all(held):
        return "reproduced"
    return "partly reproduced" if any(held) else "not reproduced"


def attack_finding(key: Curve, part: Rows[Case, Result], one: Fit) -> Finding:
    """Whether an attacked layer does what the paper says, by which rule; None without a claim."""
    where = "" if key.model == RANDOM_WEIGHTS else f" of {key.model} layer {key.layer}"
    exponent = f"exponent {one.interval} in n-1"
    if key.attention == "l2":
        holds = one.exponent < NO_GROWTH
        grows = "shows no such growth" if holds else "grows too"
        rule = f"no growth is an exponent below {NO_GROWTH}"
        return holds, f"tied L2 {grows}: {exponent} at its worst radius ({rule})"
    holds = abs(one.exponent - 0.5) <= EXPONENT_TOLERANCE
    near = f"within {EXPONENT_TOLERANCE} of 1/2"
    if key.alone:
        said = "reproduced" if holds else "not reproduced"
        return holds, f"one head{where} {said}: {exponent} (asked: {near}, Prop. 3.4)"
    coefficient = root_coefficient(part)
    measured = f"{exponent}, C of C n^(1/2) {coefficient:.3g}"
    theirs = published(key)
    if theirs is None:
        return None, f"all heads{where} at R = {key.radius:g}, not in the paper: {measured}"
    ratio = max(coefficient / theirs[0], theirs[0] / coefficient)
    holds = holds and ratio <= COEFFICIENT_FACTOR
    said = "reproduced" if holds else "not reproduced"
    return holds, (
        f"all heads{where} {said}: {measured}, the paper's {theirs[0]:g} (asked: {near}, and C "
        f"within a factor of {COEFFICIENT_FACTOR:g})"
    )


def text_findings(found: Mapping[Curve, Fit]) -> list[Finding]:
    """What the curves on text say beside the paper's."""
    if not found:
        return []
    known = {key: value for key in found if (value := published(key))}
    near = [abs(found[key].exponent - value[1]) <= 0.1 for key, value in known.items()]
    slower = [one.exponent < 0.5 for one in found.values()]
    share = f"{sum(slower)} of {len(slower)}"
    findings: list[Finding] = [(all(slower), f"{share} curves on text grow slower than n^(1/2)")]
    if not known:
        none = "none of these layers on text is in the paper, whose exponent is about 1/4"
        return [*findings, (None, none)]
    findings.append(
        (all(near), f"{sum(near)} of {len(near)} text exponents are within 0.1 of the paper's")
    )
    if any(key.model == "random_gpt2" for key in known):
        uniform = (
            "at this initialisation attention is nearly uniform, so the masked constant is that of "
            "the Cesaro mean, about n^0.08 here; the paper's script left dropout switched on"
        )
        findings.append((None, uniform))
    return findings


def table_line(key: Curve, part: Rows[Case, Result], one: Fit | None) -> dict[str, Any]:
    """One curve: fit, the paper's fit, and the largest length."""
    last_case, last = part[-1]
    theirs = published(key)
    magnitude = fit([(c.num_tokens, r.magnitudes) for c, r in part])
    return {
        "layer": key.label,
        "data": key.data,
        "fitted in": one.variable if one else None,
        "exponent": one.exponent if one else math.nan,
        "from": one.low if one else math.nan,
        "to": one.high if one else math.nan,
        "C": one.coefficient if one else math.nan,
        "C of C n^(1/2)": root_coefficient(part) if key.data == "two_cluster" else math.nan,
        "paper": f"{theirs[0]:g} n^{theirs[1]:g}" if theirs else None,
        "largest n": last_case.num_tokens,
        "constant there": mean(last.constants),
        "magnitude there": mean(last.magnitudes),
        "exponent of magnitude": magnitude.exponent if magnitude else math.nan,
        "converged": min(r.converged for _, r in part),
    }


def root_coefficient(part: Rows[Case, Result]) -> float:
    """C of C √n through a curve, least squares in logarithms: what the paper gives for attacks."""
    logs = [math.log(mean(r.constants) / math.sqrt(c.num_tokens)) for c, r in part]
    return math.exp(mean(logs))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def draw(rows: Rows[Case, Result]) -> "Figure":
    """Text, attack, factors and magnitudes."""
    figure, (text, attacked_layers, factors, magnitude) = panels(2, 2)
    draw_growth(text, rows, "text", "real text")
    draw_growth(attacked_layers, rows, "two_cluster", "two-cluster attack")
    draw_scales(factors, rows)
    seen: dict[str, Rows[Case, Result]] = {}
    for key, part in of_kind(rows, "text").items():  # a mask does not change the inputs
        seen.setdefault(key.label.partition(",")[0], part)
    for index, (label, part) in enumerate(seen.items()):
        n = [c.num_tokens for c, _ in part]
        style = f"k{marker(index)}{('-', '--', '-.', ':')[index % 4]}"
        values = [mean(r.magnitudes) for _, r in part]
        magnitude.plot(n, values, style, fillstyle="none", label=label)
    magnitude.set(
        xlabel="sequence length n (tokens)", ylabel="token magnitude (mean ‖x_i‖²)^½ (units of X)",
        title="inputs of the layers", xscale="log", yscale="log",
    )  # fmt: skip
    for axes in (text, attacked_layers, factors, magnitude):
        if axes.lines:
            axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def of_kind(rows: Rows[Case, Result], data: Data) -> dict[Curve, list[tuple[Case, Result]]]:
    """The curves on one kind of data."""
    return {key: part for key, part in curves(rows).items() if key.data == data}


def marker(index: int) -> str:
    """A marker for a curve."""
    return "os^vDP<>Xp*h"[index % 12]


def draw_growth(axes: "Axes", rows: Rows[Case, Result], data: Data, title: str) -> None:
    """Mean constants against n, our fits, and the paper's."""
    found = fits(rows)
    for index, (key, part) in enumerate(of_kind(rows, data).items()):
        n = [c.num_tokens for c, _ in part]
        values = [mean(r.constants) for _, r in part]
        one = found.get(key)
        label = key.label if one is None else f"{key.label}:\n{one}"
        axes.plot(n, values, f"k{marker(index)}", fillstyle="none", label=label)
        if one is not None:
            lone = 1 if data == "two_cluster" else 0
            power = [one.coefficient * (size - lone) ** one.exponent for size in n]
            axes.plot(n, power, "-", color="0.5")
        theirs = published(key)
        if theirs:
            curve = [theirs[0] * size ** theirs[1] for size in n]
            drawn = {line.get_label() for line in axes.lines}
            label = f"paper {theirs[0]:g} n^{theirs[1]:g}"
            axes.plot(n, curve, "k:", label="_again" if label in drawn else label)
    axes.set(
        xlabel="sequence length n (tokens)", ylabel="local Lipschitz constant, frobenius (no unit)",
        title=title, xscale="log", yscale="log",
    )  # fmt: skip


def draw_scales(axes: "Axes", rows: Rows[Case, Result]) -> None:
    """Mean constants against the factor on the inputs, with the ceiling of large factors."""
    lines: dict[str, list[tuple[float, Result]]] = {}
    for case, result in rows:
        if case.data == "scaled_text":
            label = f"{case.attention} layer {case.layer}, n = {case.num_tokens}"
            lines.setdefault(label.replace("_", " "), []).append((case.scale, result))
    for index, (label, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        scales = [scale for scale, _ in points]
        values = [mean(result.constants) for _, result in points]
        axes.plot(scales, values, f"k{marker(index)}-", fillstyle="none", label=label)
        top = points[-1][1].ceiling
        if math.isfinite(top):
            axes.axhline(
                top, color="k", linestyle=":", label="√n Σ‖V_h‖, Theorem 3.7 and Lemma 3.8"
            )
    axes.set(
        xlabel="factor on the inputs (no unit)", title="scaled inputs",
        ylabel="local Lipschitz constant, frobenius (no unit)", xscale="log", yscale="log",
    )  # fmt: skip


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
