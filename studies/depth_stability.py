"""Kim et al. 2021, §5.4: which models still train as they get deeper, at one fixed learning rate.

Every model kind is trained from scratch at every depth by Adam with a constant learning rate, no
warm-up, no clipping and no dropout, on the same batches. A run has failed if it stopped at a
non-finite loss or ended no better than the frequencies of single characters.

The paper: dot product fails beyond 10 layers, tied L2 and Contractive-L2 train up to 18. Its
learning rate and the place of its LayerNorm are not known to us, so dot product and L2 stand here
in both orders: LN before each branch, and after each sum (``…_post``). The causal certificate,
attention in the unit ball and inputs in a ball (``…_ball``) are not the paper's, nor are the
learned position bias and these kinds: the recipe of ``nanogpt_cpu_causal`` (certified), dot product
without LayerNorm, and a coupling.
Reproduced means that dot product fails in both orders at every depth beyond 10, trains up to 10,
and no L2 or contractive kind fails.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from invformer.config.section import option
from invformer.data.windows import EvaluationWindows, Windows
from invformer.evaluation.likelihood import score
from invformer.evaluation.ngram import witten_bell_nats
from invformer.nn.transformer import CharTransformer
from studies.report import Figure, Finding, Rows, Summary, by, curves, look_of, panels, table
from studies.study import Study, grid, program
from studies.training import AdamOptions, ModelCase, mean_nats, new_model, train_by_adam

Kind = Literal[
    "dot_product", "dot_product_post", "l2", "l2_post", "contractive", "contractive_causal",
    "contractive_bounded", "contractive_ball", "contractive_bounded_ball", "certified",
    "dot_product_bare", "coupling",
]  # fmt: skip

LIMIT = 10  # layers, beyond which the paper's dot product fails
TARGET = 0.7  # c of the contractive kinds
BALL = 2.0  # inputs of the branches of kinds in a ball, in units of √D
BESIDE = ("dot_product_bare", "coupling")  # the paper's claim
NETWORKS: dict[str, dict[str, Any]] = {
    "dot_product": {"name": "dot_product", "certificate": None},
    "l2": {"name": "l2", "certificate": None},
    "contractive": {"name": "contractive_l2"},
    "contractive_causal": {"name": "contractive_l2", "certificate": "causal"},
    "contractive_bounded": {"name": "contractive_bounded"},
    "certified": {
        "name": "contractive_bounded", "certificate": "causal", "strictly_causal": True,
        "activation_norm": False, "diagonal_scaling": True,
    },
    "coupling": {"name": "reversible", "certificate": None},
}  # fmt: skip


@dataclass(kw_only=True)
class Options(AdamOptions):
    """Train every model kind at every depth with one fixed learning rate."""

    kinds: list[Kind] = option(list(get_args(Kind)), "model kinds")
    depths: list[int] = option([2, 6, 10, 14, 18], "numbers of blocks", "[1, 1e3]")


@dataclass(frozen=True, kw_only=True)
class Case(ModelCase):
    """One model and everything about its training."""

    kind: Kind


@dataclass(frozen=True)
class Result:
    """How the training ended."""

    val_nats: float  # validation nats per character; NaN after a non-finite loss
    unigram_nats: float  # what character frequencies of the training text score there
    steps_taken: int  # optimiser steps; fewer than asked for after a non-finite loss
    kept_mebibytes: float  # that a batch keeps for its backward pass, without the weights
    first_gradients: list[float]  # norm in every block before training, bottom first
    last_gradients: list[float]  # and after it

    @property
    def failed(self) -> bool:
        """Not finite, or no better than single characters' frequencies."""
        return not self.val_nats < self.unigram_nats


def cases(options: Options) -> list[Case]:
    """Every kind at every depth, shallow ones first."""
    text = options.data.case_fields(options.seq_len)
    return grid(Case, options, text, num_layers=options.depths, kind=options.kinds)


def measure(case: Case, device: torch.device) -> Result:
    """Train one model and score it."""
    text = case.text
    model = build_kind(case).to(device)
    batch = [part.to(device) for part in case.batches.batch(0)]
    model.initialise(batch[0])
    kept, first = mebibytes_kept(model, *batch), block_gradients(model, *batch)
    losses = train_by_adam(model, case)
    last, finite = block_gradients(model, *batch), all(map(math.isfinite, losses))
    windows = EvaluationWindows(text.val, case.seq_len, case.seq_len, case.batch_size)
    return Result(
        val_nats=score(model.eval(), windows, device).nats if finite else math.nan,
        unigram_nats=witten_bell_nats(text.train, text.val, 1, vocab_size=text.vocab_size),
        steps_taken=len(losses),
        kept_mebibytes=kept,
        first_gradients=first,
        last_gradients=last,
    )


def mebibytes_kept(model: CharTransformer, tokens: Windows, targets: Windows) -> float:
    """What autograd keeps of a forward pass, every storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mean_nats(model(tokens, folded=True), targets)  # which holds what is kept
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del loss
    return sum(size for at, size in kept.items() if at not in weights) / 2**20


def block_gradients(model: CharTransformer, tokens: Windows, targets: Windows) -> list[float]:
    """Norm of the loss's gradient in the parameters of every block, bottom first."""
    model.zero_grad()
    mean_nats(model(tokens, folded=True), targets).backward()
    norms = [
        nn.utils.get_total_norm([p.grad for p in block.parameters() if p.grad is not None]).item()
        for block in model.stack.blocks
    ]
    model.zero_grad()
    return norms


def build_kind(case: Case) -> CharTransformer:
    """A fresh model of the kind, in float32."""
    stem = re.sub("_(post|ball|bare)$", "", case.kind)
    options: dict[str, Any] = {"activation_norm": True, "diagonal_scaling": False}
    model = new_model(
        case, lipschitz_target=TARGET,
        input_radius=BALL if case.kind.endswith("_ball") else None, **options | NETWORKS[stem],
    )  # fmt: skip
    block: Any
    for index, block in enumerate(model.stack.blocks):
        if case.kind.endswith("_post"):
            branches = block.attention.inner, block.feed_forward.inner
            post = [PostNorm(branch, case.d_model) for branch in branches]
            model.stack.blocks[index] = nn.Sequential(*post)
        elif case.kind.endswith("_bare"):
            block.attention.norm = block.feed_forward.norm = nn.Identity()
    return model.float()


class PostNorm(nn.Module):
    """x ↦ LN(x + f(x)), as in Vaswani et al. 2017."""

    def __init__(self, f: nn.Module, d_model: int) -> None:
        super().__init__()
        self.f = f
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the branch and normalise the sum."""
        return self.norm(x + self.f(x))


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Who trained how deep."""
    more = {"bottom/top": lambda _, result: result.first_gradients[0] / result.first_gradients[-1]}
    lines = table(rows, more=more)
    failed = {
        kind: {case.num_layers: result.failed for case, result in group}
        for kind, group in by(rows, "kind").items()
    }
    findings, must = claims(failed)
    for kind, depths in failed.items():
        bad = ", ".join(str(depth) for depth in sorted(depths) if depths[depth])
        where = f"fails at {bad} layers" if bad else "trains at every depth"
        findings.append((None, f"{kind} {where}"))
    return Summary(lines, findings, must)


def claims(failed: Mapping[Kind, Mapping[int, bool]]) -> tuple[list[Finding], list[Finding]]:
    """The paper's claims about the failures of each kind, by depth, and what must hold."""
    named = {kind: depths for kind, depths in failed.items() if kind not in BESIDE}
    dot = [depths.items() for kind, depths in named.items() if kind.startswith("dot_product")]
    beyond = [bad for depths in dot for depth, bad in depths if depth > LIMIT]
    shallow = [bad for depths in dot for depth, bad in depths if depth <= LIMIT]
    others = [any(named[kind].values()) for kind in named if not kind.startswith("dot_product")]
    if not beyond or not others:  # nothing that the paper compares
        return [], []
    findings: list[Finding] = [
        (all(beyond), f"dot product fails at every depth beyond {LIMIT}"),
        (bool(shallow) and not any(shallow), f"it trains at every depth up to {LIMIT}"),
    ]
    must: list[Finding] = [
        (not any(others), "no L2 or contractive kind fails at any depth"),
        (any(beyond), f"dot product fails at some depth beyond {LIMIT}"),
    ]
    return findings, must


def draw(rows: Rows[Case, Result]) -> Figure:
    """Nats against depth; marks of models that did not train, above a line; gradients."""
    figure, (nats, gradients) = panels(1, 2)
    curves(nats, rows, "num_layers", lambda _, r: math.nan if r.failed else r.val_nats, ("kind",))
    case, unigram = rows[0][0], rows[0][1].unigram_nats
    label = "single characters' frequencies; above: failed"
    nats.axhline(unigram, color="0.5", linewidth=0.8, label=label)
    kinds, failed = list(by(rows, "kind")), by([row for row in rows if row[1].failed], "kind")
    for place, (kind, group) in enumerate(failed.items(), 1):
        heights = len(group) * [unigram + 0.04 * place]
        look: dict[str, Any] = {**look_of(kinds.index(kind)), "linestyle": "none"}
        nats.plot([one.num_layers for one, _ in group], heights, **look)
    deepest = max(one.num_layers for one, _ in rows)
    for index, (one, result) in enumerate(row for row in rows if row[0].num_layers == deepest):
        norms = result.first_gradients
        gradients.plot(range(1, deepest + 1), norms, label=one.kind, **look_of(index))
    nats.set(ylabel="validation nats per character")
    nats.set(title=f"{case.corpus}, {case.num_steps} steps of Adam at {case.lr:g}")
    gradients.set(ylabel="gradient norm before training", yscale="log", title=f"{deepest} blocks")
    for axes, what in ((nats, "blocks"), (gradients, "block, bottom first")):
        axes.set(xlabel=what)
        axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
