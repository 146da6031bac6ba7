"""The Lipschitz constant of a whole network, from embedding to logits, and what it buys.

    ‖logits(X) − logits(X′)‖_∞ ≤ L ‖X − X′‖,   ‖X‖ = max_i ‖x_i‖₂,   L = max_v ‖w_v‖₂ Π_l k_l

X are the embeddings. Every character's embedding has length √D (RMS 1), there is no position
embedding, no diagonal scaling, no ActNorm and no LayerNorm; w_v is the head's row of character v.
k_l bounds the Lipschitz constant of residual layer l: 1 + c_l if c_l bounds its branch's, 1 for the
feed-forward layers of studies/non_expansive.py, and √(1 + c²/(β(2 − β))) for the attention layers
of studies/forgetting_attention.py, β being ``forgotten``. For a total L the head's rows get the
length L/Π_l k_l.
Stacks are bi-Lipschitz: Π(1 − c_l) ‖X − X′‖ ≤ ‖S(X) − S(X′)‖ ≤ Π k_l ‖X − X′‖.

On the validation windows: the radius around the embeddings in which a prediction is proven to stay
(studies/certified_radius.py), and PGD at that radius and at multiples of it.

Beside it: Newhouse et al. 2025 (arXiv 2507.13338) report 60 % accuracy on Shakespeare, by their
abstract at a constant of 2, and 1.779 nats on the whole split. Their norm differs: a mark only.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.branches.in_ball.attention import BoundedAttention
from invformer.config.schema import OptimConfig
from invformer.config.section import option
from invformer.nn.certificate import Certificate
from invformer.nn.proof import certify
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer
from invformer.numerics.rounding import product_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound
from invformer.training.optimizers import build_optimizer, warmup_cosine
from studies.certified_radius import MULTIPLES, attacked
from studies.forgetting_attention import ForgettingAttention, forgetting_constant
from studies.non_expansive import GradientFeedForward
from studies.report import Figure, Rows, Summary, curves, look_of, panels, table
from studies.study import Study, grid, program
from studies.training import ModelCase, ModelOptions, TextConfig, new_model, scores, train

NEWHOUSE_NATS, NEWHOUSE_ACCURACY = 1.779, 0.60  # at a constant of 2 in their norm
C_GRADIENT = 0.9  # constant of feed-forwards that do not expand
LayersName = Literal["contractive", "gradient", "forgetting"]


@dataclass(kw_only=True)
class WholeTextConfig(TextConfig):
    """The text, whose validation split is scored whole."""

    val_characters: int | None = option(None, "as in other studies", "[2, 1e9]")


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Train for a constant of the whole network, and attack what it certifies."""

    totals: list[float] = option([2, 10, 100], "L of the whole network", "[1, 1e12]")
    layers: LayersName = option(
        "forgetting",
        "contractive: any x + f(x); gradient: feed-forwards do not expand; forgetting: attentions "
        "forget where they write as well",
    )
    c: float = option(0.4, "constant of attentions; contractive: of feed-forwards too", "(0, 1)")
    forgotten: float = option(0.55, "share that attentions forget, less than 1 − c", "(0, 1)")
    num_heads: int = option(1, "attention heads, a divisor of the width", "[1, 1e4]")
    d_head: int | None = option(None, "channels of a head; null is d_model/num_heads", "[1, 1e5]")
    d_ff: int | None = option(None, "hidden units; null is 8 D, 4 D if contractive", "[1, 1e6]")
    num_layers: int = option(2, "blocks", "[1, 1e3]")
    lr: float = option(5e-3, "peak learning rate of AdamW", "(0, 10]")
    muon_lr: float = option(2e-2, "peak learning rate of Muon", "(0, 10]")
    num_windows: int = option(16, "validation windows that are attacked", "[1, 1e5]")
    pgd_steps: int = option(20, "gradient steps of an attack", "[1, 1e5]")
    data: TextConfig = field(default_factory=WholeTextConfig)

    def check(self) -> None:
        """A layer can be inverted."""
        super().check()
        if self.layers == "forgetting" and self.c + self.forgotten >= 1:
            self.refuse("forgotten", f"c={self.c:g} and {self.forgotten:g} must add to less than 1")


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One network and its training."""

    muon_lr: float
    total: float
    layers: LayersName
    c: float
    forgotten: float
    d_head: int | None
    d_ff: int | None
    num_windows: int
    pgd_steps: int


@dataclass(frozen=True)
class Result:
    """What was proven, and what was measured."""

    nats: float  # of the whole validation split in full windows
    accuracy: float  # the same
    bound: float  # proven L, from embedding to logits
    stack_below: float  # Π(1 − c_l)
    stack_above: float  # Π k_l
    rms_bound: float  # √(D/V) ‖W‖₂ Π k_l, between root mean squares
    radius: float  # median certified radius of correct positions, of the length √D
    spacing: float  # the least distance of two embeddings, of the length √D
    flips: list[float]  # share of windows whose attacked prediction changed, at MULTIPLES


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
        case, name="contractive_bounded", lipschitz_target=case.c, diagonal_scaling=False,
        d_head=case.d_head, d_ff=case.d_ff,
    )  # fmt: skip
    vocab_size, width = model.embedding.token.weight.shape
    model.embedding = UnitEmbedding(vocab_size, case.seq_len, case.d_model, width)
    model.embedding.position.requires_grad_(False)
    model.register_module("norm", nn.Identity())
    expansion = 1 + case.c  # of an attention
    if case.layers == "forgetting":
        expansion = forgetting_constant(case.c, case.forgotten)
    assert isinstance(model.stack, InvertibleStack)
    for _, layer in model.stack.residual_layers() if case.layers != "contractive" else ():
        if not isinstance(layer.branch, BoundedAttention):
            d_ff = case.d_ff or 8 * case.d_model  # as many parameters as others have by 4 D
            layer.branch = GradientFeedForward(case.d_model, d_ff, C_GRADIENT)
        elif case.layers == "forgetting":
            # Tokens have the length √D: at a sharpness of 1/2 all would be near the sphere.
            layer.branch.log_sharpness.data -= math.log(case.d_model) / 2
            layer.branch = ForgettingAttention(layer.branch, case.forgotten)
    num_expanding = (2 if case.layers == "contractive" else 1) * case.num_layers
    model.head = BoundedHead(case.d_model, vocab_size, case.total / expansion**num_expanding)
    return model


def layer_constants(model: CharTransformer, certificate: Certificate) -> list[float]:
    """k_l of every residual layer, rounded up, from the proven constants c_l of the branches.

    A gradient layer gets 1 + 2⁻⁵⁰ D, not 1: c Ŵ is rounded in float64, so that its Jacobian is
    symmetric only up to a matrix of norm ≤ 2⁻⁵³ c ‖Ŵ‖_F² ≤ 2⁻⁵³ D. Unless c_l ≤ 1 is proven, a
    layer gets 1 + c_l.
    """
    assert isinstance(model.stack, InvertibleStack)
    certificate.require("token_max", "global")
    assert certificate.dtype == "float64"
    assert certificate.scales == certificate.conditions == {}  # layers are x + f(x)
    constants = []
    for name, layer in model.stack.residual_layers():
        k, branch = sum_up(1, certificate.per_branch[name]), layer.branch
        if layer.input_radius is None and k <= 2:
            if isinstance(branch, GradientFeedForward):
                k = 1 + 2.0**-50 * model.head.in_features
            elif isinstance(branch, ForgettingAttention):
                k = min(k, branch.layer_constant())
        constants.append(k)
    return constants


def cases(options: Options) -> list[Case]:
    """Every total."""
    text = options.data.case_fields(options.seq_len, options.num_windows)
    return grid(Case, options, text, total=options.totals)


def measure(case: Case, device: torch.device) -> Result:
    """Train by Muon as train.py does, then certify and attack in float64."""
    text, steps = case.text, case.num_steps
    model = build(case).to(device)
    optim = OptimConfig(name="muon", lr=case.lr, muon_lr=case.muon_lr, weight_decay=0.0)
    optimiser = build_optimizer(model, optim)
    schedule = warmup_cosine(optimiser, min(100, steps // 10 + 1), steps)
    train(model, case.batches, optimiser, steps, schedule=schedule)
    model = model.double().eval().requires_grad_(False)
    windows, targets = text.windows(case.seq_len, device)
    nats, accuracy = scores(model, windows, targets)
    assert isinstance(model.head, BoundedHead)
    model.head.weight.copy_(model.head.rows())  # what the radii are computed from
    embeddings = model.embedding.token.weight  # spacing measures the least distance of these
    embeddings.copy_(nn.functional.normalize(embeddings, dim=-1))
    certificate = certify(model, "token_max", dtype=torch.float64)
    rows, constants = model.head.rows(), certificate.per_branch.values()
    above = product_up(*layer_constants(model, certificate))
    bound = product_up(above, rows.norm(dim=-1).amax().item(), 1 + 1e-12)
    rms = math.sqrt(rows.shape[1] / rows.shape[0])
    windows, targets = windows[: case.num_windows], targets[: case.num_windows]
    radius, flips = attacked(model, windows, targets, above, case.pgd_steps)
    return Result(
        nats=nats,
        accuracy=accuracy,
        bound=bound,
        stack_below=math.prod(1 - c for c in constants),
        stack_above=above,
        rms_bound=product_up(above, spectral_norm_bound(rows).item(), rms),
        radius=radius / math.sqrt(case.d_model),
        spacing=2 * model.embedding.decoding_margin(),
        flips=flips,
    )


def summarise(rows: Rows[Case, Result]) -> Summary:
    """One line for each total."""
    flips = {
        f"flips at {multiple:g}r": lambda case, result, i=i: result.flips[i]
        for i, multiple in enumerate(MULTIPLES)
    }
    fields = ["total", "layers", "c", "forgotten"]
    lines, findings = table(rows, fields, flips), []
    for line in lines:
        if line["total"] == 10:
            findings.append((line["accuracy"] >= NEWHOUSE_ACCURACY, "60 % accuracy at 10"))
        if line["total"] in (2, 10):
            findings.append((line["nats"] <= NEWHOUSE_NATS, f"1.779 nats at {line['total']:g}"))
    beaten = sum(r.flips[0] > 0 for _, r in rows)
    above = sum(r.bound > case.total * 1.001 for case, r in rows)
    must = [
        (beaten == 0, f"{beaten} attacks inside certified radii"),
        (above == 0, f"{above} bounds larger than asked for"),
    ]
    return Summary(lines, findings, must)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Loss against the constant; flips against the radius of the attack."""
    figure, (left, right) = panels(1, 2)
    curves(left, rows, "total", "nats")
    words = f"Newhouse et al.: {NEWHOUSE_NATS}, another norm"
    left.axhline(NEWHOUSE_NATS, color="0.5", linestyle=":", label=words)
    left.set(xscale="log", xlabel="proven L, from embeddings to logits")
    left.set(ylabel="validation nats per character")
    for index, (case, result) in enumerate(rows):
        right.plot(MULTIPLES, result.flips, label=f"L = {case.total:g}", **look_of(index))
    right.set(xscale="log", xlabel="size of the attack, in certified radii")
    right.set(ylabel="share of attacked predictions that changed")
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
