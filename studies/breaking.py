"""Kim et al. 2021, §3: three slips that cost L2 attention its Lipschitz constant, and dot product.

Tokens move apart as c grows, and ‖J‖ in entry_max is computed exactly at each c:

    dot product   tokens (0, c, −c), D = 1, unit weights: ‖J‖ = 2c²/3 + 1, causal mask or not
    untied        W^Q = 1, W^K = ½, one query at 10c, the other keys at 10c ± c: 6c² − 1
    self hidden   tokens (0, c, −c), the diagonal masked: 4c² − 1
    without A_h   H = 2, D = 4, values X W^V instead of X A_h W^V: the first head weighs tokens by
                  channel 1 and averages channel 3, along which they are c apart: ∝ c

The theorem assumes what each slip removes; the formulas are ours. Tied L2 attention with everything
in place stays below the theorem's bound on the same tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from invformer.branches.tied_l2.kim import paper_output_map
from invformer.numerics.norms import Tokens
from studies import kim
from studies.layer_bounds import tied_attention
from studies.report import Finding, Rows, Summary, by, table
from studies.study import Study, StudyOptions, program

Variant = Literal["dot_product", "dot_product_causal", "untied", "self_hidden", "without_a"]

VARIANTS: tuple[Variant, ...] = get_args(Variant)
DISTANCES = (1.0, 10.0, 100.0, 1e3, 1e4)  # c; the slope between the last two is the asymptotic one

# ‖J‖ of each variant at c, where a formula is known.
FORMULAS: dict[Variant, Callable[[float], float]] = {
    "dot_product": lambda c: 2 * c**2 / 3 + 1,
    "dot_product_causal": lambda c: 2 * c**2 / 3 + 1,
    "untied": lambda c: 6 * c**2 - 1,
    "self_hidden": lambda c: 4 * c**2 - 1,
}


class Options(StudyOptions):
    """Break L2 attention in three ways and measure the Jacobian."""


@dataclass(frozen=True)
class Case:
    """One variant at one distance; everything else is fixed."""

    variant: Variant
    c: float


@dataclass(frozen=True)
class Result:
    """‖J‖ in entry_max."""

    broken: float  # of the variant
    tied: float  # of tied L2 attention on the same tokens
    bound: float  # the theorem's bound for that tied attention


Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # W^Q, W^K, W^V as (H, D, d) and W^O as (H, d, D)


def cases(options: Options) -> list[Case]:
    """Every variant at every distance."""
    return [Case(variant, c) for variant in VARIANTS for c in DISTANCES]


def measure(case: Case, device: torch.device) -> Result:
    """Both Jacobians, densely, in float64."""
    x = tokens(case).to(device)
    w = w_q, _, w_v, w_o = weights(case.variant, device)
    g = paper_output_map(w_q, w_v, w_o)
    return Result(
        broken=entry_max_norm(lambda x: broken_attention(x, w, case.variant), x),
        tied=entry_max_norm(lambda x: tied_attention(x, w_q, g), x),
        bound=kim.entry_max_bound(w_q, w_v, w_o.flatten(0, 1), kim.log_mass_of(len(x))),
    )


def tokens(case: Case) -> Tokens:
    """Three tokens, placed where the variant is at its worst."""
    c = case.c
    match case.variant:
        case "untied":
            rows = [[10 * c], [22 * c], [18 * c]]
        case "dot_product_causal":
            rows = [[c], [-c], [0.0]]  # the last token sees all
        case "without_a":  # one apart in channel 1, so that the softmax is neither flat nor hard
            rows = [[0.0] * 4, [1.0, 0.0, c, 0.0], [-1.0, 0.0, -c, 0.0]]
        case _:
            rows = [[0.0], [c], [-c]]
    return torch.tensor(rows, dtype=torch.float64)


def weights(variant: Variant, device: torch.device) -> Weights:
    """Unit weights; two heads that read channels 1–2 and 3–4 for ``without_a``."""
    one = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    if variant != "without_a":
        return one, one / 2 if variant == "untied" else one, one, one
    read = torch.eye(4, dtype=torch.float64, device=device).unflatten(0, (2, 2))  # (H, d, D)
    carry = (read + read.flip(0)).mT  # values: own channels plus the other head's
    return read.mT, read.mT, carry, read


def broken_attention(x: Tokens, w: Weights, variant: Variant) -> Tokens:
    """The variant, written out; no layer of this package would build it."""
    w_q, w_k, w_v, w_o = w
    scale = 1 / math.sqrt(w_q.shape[-1])
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    if variant.startswith("dot_product"):
        logits = scale * q @ k.mT
    else:
        logits = -scale * (q[:, :, None] - k[:, None]).square().sum(-1)
    if variant == "dot_product_causal":
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf)
    if variant == "self_hidden":
        logits = logits.masked_fill(torch.eye(len(x), device=x.device).bool(), -math.inf)
    if variant in ("untied", "self_hidden"):
        v = scale * (x @ w_q) @ (w_q.mT @ w_v)  # X A_h W^V, as the paper has it
    return (logits.softmax(-1) @ v @ w_o).sum(0)


def entry_max_norm(f: Callable[[Tensor], Tensor], x: Tokens) -> float:
    """‖J_f(x)‖ in entry_max: the largest absolute row sum."""
    return torch.func.jacrev(f)(x).abs().sum((-2, -1)).amax().item()


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Formulas at every distance, growth between the last two, and tied L2's bound."""
    findings: list[Finding] = []
    for variant, group in by(rows, "variant").items():
        (c1, j1), (c2, j2) = sorted((case.c, result.broken) for case, result in group)[-2:]
        exponent = math.log(j2 / j1) / math.log(c2 / c1)
        grows = abs(exponent - (1 if variant == "without_a" else 2)) < 0.1
        findings.append((grows, f"{variant} {j2:.4g} (c = {c2:g}) grows like c^{exponent:.2f}"))
    worst = max(
        abs(r.broken / FORMULAS[c.variant](c.c) - 1) for c, r in rows if c.variant in FORMULAS
    )
    findings.append((worst < 1e-6, f"formulas met to {worst:.0e}"))
    largest = max(r.tied for _, r in rows)
    below = all(r.tied <= r.bound for _, r in rows)
    words = f"tied L2 on the same tokens is at most {largest:.3g}, within its bound"
    return Summary(table(rows), findings, must=[(below, words)])


STUDY = program(Study(Options, Case, Result, cases, measure, summarise))
