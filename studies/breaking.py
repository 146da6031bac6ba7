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
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds import kim
from invformer.config.section import option
from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.linear_map import dense_jacobian
from studies.report import Figure, Outcome, Rows, Summary, panels
from studies.study import Study, StudyOptions, main

Variant = Literal["dot_product", "dot_product_causal", "untied", "self_hidden", "without_a"]

VARIANTS: tuple[Variant, ...] = get_args(Variant)
FAR = 100.0  # from this distance on a slope is the asymptotic one
CHANNEL_GAP = (
    1.0  # of the tokens in channel 1 for ``without_a``: the softmax is neither flat nor hard
)

# ‖J‖ of each variant at c, where a formula is known.
FORMULAS: dict[Variant, Callable[[float], float]] = {
    "dot_product": lambda c: 2 * c**2 / 3 + 1,
    "dot_product_causal": lambda c: 2 * c**2 / 3 + 1,
    "untied": lambda c: 6 * c**2 - 1,
    "self_hidden": lambda c: 4 * c**2 - 1,
}


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Break L2 attention in three ways and measure the Jacobian."""

    program: ClassVar[str] = "-m studies.breaking"
    distances: list[float] = option(
        [1.0, 10.0, 100.0, 1e3, 1e4], "c, how far apart tokens are", within="[1, 1e5]"
    )


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


@dataclass(frozen=True)
class Weights:
    """W^Q, W^K, W^V as (H, D, d) and W^O as (H, d, D)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor


def cases(options: Options) -> list[Case]:
    """Every variant at every distance."""
    return [Case(variant, c) for variant in VARIANTS for c in options.distances]


def measure(case: Case, device: torch.device) -> Result:
    """Both Jacobians, densely, in float64."""
    x = tokens(case).to(device)
    w = weights(case.variant, device)
    return Result(
        broken=entry_max_norm(lambda x: broken_attention(x, w, case.variant), x),
        tied=entry_max_norm(lambda x: tied_attention(x, w), x),
        bound=kim.entry_max_bound(w.w_q, w.w_v, w.w_o.flatten(0, 1), len(x)),
    )


def tokens(case: Case) -> Float[Tensor, "3 width"]:
    """Three tokens, placed where the variant is at its worst."""
    c = case.c
    match case.variant:
        case "untied":
            rows = [[10 * c], [22 * c], [18 * c]]
        case "dot_product_causal":
            rows = [[c], [-c], [0.0]]  # the last token sees all
        case "without_a":
            rows = [[0.0] * 4, [CHANNEL_GAP, 0.0, c, 0.0], [-CHANNEL_GAP, 0.0, -c, 0.0]]
        case _:
            rows = [[0.0], [c], [-c]]
    return torch.tensor(rows, dtype=torch.float64)


def weights(variant: Variant, device: torch.device) -> Weights:
    """Unit weights; two heads that read channels 1–2 and 3–4 for ``without_a``."""
    one = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    if variant != "without_a":
        return Weights(one, one / 2 if variant == "untied" else one, one, one)
    read = torch.eye(4, dtype=torch.float64, device=device).unflatten(0, (2, 2))  # (H, d, D)
    carry = (read + read.flip(0)).mT  # values: own channels plus the other head's
    return Weights(read.mT, read.mT, carry, read)


def broken_attention(
    x: Float[Tensor, "tokens width"], w: Weights, variant: Variant
) -> Float[Tensor, "tokens width"]:
    """The variant, written out; no layer of this package would build it."""
    scale = 1 / math.sqrt(w.w_q.shape[-1])
    q, k, v = x @ w.w_q, x @ w.w_k, x @ w.w_v
    if variant.startswith("dot_product"):
        logits = scale * q @ k.mT
    else:
        logits = -scale * (q[:, :, None] - k[:, None]).square().sum(-1)
    if variant == "dot_product_causal":
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf)
    if variant == "self_hidden":
        logits = logits.masked_fill(torch.eye(len(x), device=x.device).bool(), -math.inf)
    if variant in ("untied", "self_hidden"):
        v = scale * (x @ w.w_q) @ (w.w_q.mT @ w.w_v)  # X A_h W^V, as the paper has it
    return (logits.softmax(-1) @ v @ w.w_o).sum(0)


def tied_attention(x: Float[Tensor, "tokens width"], w: Weights) -> Float[Tensor, "tokens width"]:
    """Tied L2 attention on the same W^Q, W^V, W^O: Σ_h (P^h q^h) W^Q_hᵀ W^V_h W^O_h / √d."""
    g = w.w_q.mT @ w.w_v @ w.w_o / math.sqrt(w.w_q.shape[-1])
    return (l2_attention(x @ w.w_q) @ g).sum(0)


def entry_max_norm(f: Callable[[Tensor], Tensor], x: Float[Tensor, "tokens width"]) -> float:
    """‖J_f(x)‖ in entry_max: the largest absolute row sum."""
    return dense_jacobian(f, x).abs().sum(-1).amax().item()


def growth_exponent(points: list[tuple[float, float]]) -> float:
    """The slope of log ‖J‖ over log c between the two largest c; NaN unless both are far."""
    far = sorted(point for point in points if point[0] >= FAR)
    if len(far) < 2:
        return math.nan
    (c1, j1), (c2, j2) = far[-2:]
    return math.log(j2 / j1) / math.log(c2 / c1)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Measured against the formulas, and the tied layer against its bound."""
    table = [
        {
            "variant": case.variant,
            "c": case.c,
            "‖J‖ expected": FORMULAS[case.variant](case.c) if case.variant in FORMULAS else None,
            "‖J‖ (ours)": result.broken,
            "‖J‖ tied L2, same tokens": result.tied,
            "bound for tied L2": result.bound,
        }
        for case, result in rows
    ]
    points: dict[Variant, list[tuple[float, float]]] = {}
    for case, result in rows:
        points.setdefault(case.variant, []).append((case.c, result.broken))
    exponents: dict[Variant, float] = {v: growth_exponent(p) for v, p in points.items()}
    largest = []
    for variant, exponent in exponents.items():
        c, value = max(points[variant])
        grows = "" if math.isnan(exponent) else f", grows like c^{exponent:.2f}"
        largest.append(f"{variant} {value:.4g} (c = {c:g}{grows})")
    paper = (
        "Theorem 3.1: dot product is not Lipschitz; Theorem 3.2 bounds L2 attention that is tied, "
        "sees the self token and has the factor A_h (no numbers)"
    )
    return Summary(table, paper, ", ".join(largest), *verdict(rows, exponents))


def verdict(rows: Rows[Case, Result], exponents: Mapping[Variant, float]) -> tuple[Outcome, str]:
    """Formulas at every distance, growth where two distances are far, and tied L2's bound."""
    off = max(
        (abs(r.broken / FORMULAS[c.variant](c.c) - 1) for c, r in rows if c.variant in FORMULAS),
        default=0.0,
    )
    tied = max(r.tied for _, r in rows)
    wrong = [
        f"{variant} grows like c^{exponent:.2f}"
        for variant, exponent in exponents.items()
        if abs(exponent - (1 if variant == "without_a" else 2)) >= 0.1
    ]
    if not off < 1e-6:
        wrong.append(f"formulas are missed by up to {off:.0e}")
    if not all(r.tied <= r.bound for _, r in rows):
        wrong.append("tied L2 exceeds its bound")
    if wrong:
        return "not reproduced", "; ".join(wrong)
    rest = f"while tied L2 on the same tokens stays at or below {tied:.3g}, under its bound"
    if any(map(math.isnan, exponents.values())):
        return "partly reproduced", (
            f"formulas are met to {off:.0e} at every distance, {rest}; how the variants grow was "
            f"not measured, which takes two distances of {FAR:g} or more"
        )
    return (
        "reproduced",
        f"every broken variant grows without bound, formulas met to {off:.0e}, {rest}",
    )


def draw(rows: Rows[Case, Result]) -> Figure:
    """‖J‖ against c: measured (markers), by formula (dotted), tied L2 (lines)."""
    figure, (axes,) = panels(1, 1)
    for index, variant in enumerate(VARIANTS):
        points = sorted((case.c, result) for case, result in rows if case.variant == variant)
        c = [distance for distance, _ in points]
        style: dict[str, Any] = {"marker": "osD^v"[index], "color": str(0.15 * index)}
        broken = [result.broken for _, result in points]
        axes.plot(c, broken, linestyle="none", fillstyle="none", label=variant, **style)
        if variant in FORMULAS:
            axes.plot(c, [FORMULAS[variant](distance) for distance in c], "k:", linewidth=1)
        axes.plot(c, [result.tied for _, result in points], markersize=3, **style)
    axes.set(
        xlabel="distance c of the tokens (units of X)", ylabel="‖J‖, entry_max (no unit)",
        xscale="log", yscale="log", title="dotted: formula; lines: tied L2 on the same tokens",
    )  # fmt: skip
    axes.legend(fontsize="small")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    raise SystemExit(main(STUDY, sys.argv[1:]))
