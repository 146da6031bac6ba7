"""Castin et al. 2024: how attention on probability measures grows, and where it stops growing.

Four statements about F: μ ↦ (Γ_μ)_# μ, its local constant at Σ m_j δ_{x_j} being ‖Df_m(X)‖_m, the
norm of weighted attention (Lemma C.5):

``two_dirac``     (Prop. 3.6) two atoms on B_R reach θ(R) (γ/2) R² e^{γR²} with θ → 1, γ the rate of
                  A; with s e^{2γR²} as the ratio of the masses the factor is 4 s^{3/2}/(1 + s)²:
                  1 for the published s = 1, and 1.299, the largest, for s = 3 (ours).
``weighted``      (Thm 3.5) no weighted measure on B_R exceeds ‖V‖ (1 + 3‖A‖R²) e^{2‖A‖R²}; random
                  ones and two atoms, against automatic differentiation of weighted attention.
``large_radius``  (Thm 3.7) ‖Df(R X)‖ → ‖V‖ (max_j #φ⁻¹(j))^½ ≤ √n ‖V‖, masked or not.
``cesaro``        (Thm 4.4) causal attention with A = 0 is the Cesàro mean: its norm tends to 2, so
                  the masked statement needs a factor 2 that the unmasked one does not.

Reproduced means that all four ran and hold: θ falls to its limit, no constant exceeds its bound and
none is NaN, the largest R is within 1e-6 of the limit, the Cesàro norm lies between 1 and 2. A
constant above its bound, or one that is no number, is "not reproduced" whatever else holds.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from invformer.config.section import option
from invformer.numerics.linear_map import dense_jacobian
from studies import castin
from studies.report import (
    Figure,
    Finding,
    Name,
    Rows,
    Summary,
    by,
    curves,
    outcome_of,
    panels,
    table,
    values,
)
from studies.study import Study, StudyOptions, program, progress

Statement = Literal["two_dirac", "weighted", "large_radius", "cesaro"]
LARGEST_EXPONENT = 350.0  # 2γR²: squares of e^{2γR²} must stay finite in float64
SMALLEST_EIGENVALUE = 1e-6
ROUNDING = 1e-12  # by how much a measured norm may exceed a bound before it counts
EXCEEDED = "values exceed their bound or are no number"
D_MODEL = 4  # of the random measures
DTYPE = torch.float64


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Attention as a map of measures: growth with the radius, its bounds and its limits."""

    radii: list[float] = option(
        [1.0, 2.0, 3.0, 4.0, 6.0, 8.0], "R of the two atoms, in units of X", "[1e-6, 1e3]"
    )
    eigenvalues: list[float] = option(
        [-1.0, 1.0], "A of the two atoms (D = 1); the rate is -A if A < 0, A/8 else",
        within="[-1e3, 1e3]",
    )  # fmt: skip
    mass_factors: list[float] = option(
        [1.0, 3.0], "s: the masses are as s e^(2 rate R^2) to 1", "[1e-6, 1e3]"
    )
    bound_radii: list[float] = option(
        [0.1, 0.3, 1.0], "R of the random measures, in units of X", "[1e-6, 5]"
    )
    num_measures: int = option(150, "random measures per radius", "[1, 1e6]")
    scales: list[float] = option(
        [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0],
        "R in the limit R X, no unit", "[1e-6, 1e6]",
    )  # fmt: skip
    num_tokens: int = option(48, "n of the limit, tokens", "[2, 1e3]")
    lengths: list[int] = option([2, 10, 100, 1000], "n of the Cesaro mean", "[2, 1e4]")

    def check(self) -> None:
        """An eigenvalue zero has no rate, and exponentials must not overflow."""
        for a in self.eigenvalues:
            if abs(a) < SMALLEST_EIGENVALUE:
                self.refuse("eigenvalues", f"{a!r} is nearer to 0 than {SMALLEST_EIGENVALUE:g}")
            largest = max((2 * rate_of(a) * r**2 for r in self.radii), default=0.0)
            if largest > LARGEST_EXPONENT:
                limit = math.sqrt(LARGEST_EXPONENT / (2 * rate_of(a)))
                self.refuse("radii", f"must be at most {limit:.4g} with the eigenvalue {a:g}")


@dataclass(frozen=True)
class Case:
    """One number, and what it is compared with.

    ``size`` is R, or n for ``cesaro``; ``parameter`` is the eigenvalue of A, and for
    ``large_radius`` 1 if causal.
    """

    statement: Statement
    size: float
    parameter: float
    mass_factor: float
    count: int
    seed: int


@dataclass(frozen=True)
class Result:
    """A local constant between what should reach it and what should bound it."""

    value: float  # ‖Df_m(X)‖_m; for ``weighted`` of the measure that comes nearest to the bound
    predicted: float  # the size, limit or norm the statement names; NaN for ``weighted``
    upper: float  # the proven bound that the value must not exceed
    ceiling: float  # √n ‖V‖ for ``large_radius``, which its limit cannot exceed; NaN elsewhere
    check: float  # largest relative difference to automatic differentiation; NaN if not evaluated


def rate_of(eigenvalue: float) -> float:
    """γ for D = 1."""
    return castin.two_cluster_rate(torch.tensor([[eigenvalue]], dtype=DTYPE))


def cases(options: Options) -> list[Case]:
    """Every statement at every size."""
    seed, n = options.seed, options.num_tokens
    return [
        *(
            Case("two_dirac", radius, a, s, 2, seed)
            for a in options.eigenvalues
            for s in options.mass_factors
            for radius in options.radii
        ),
        *(Case("weighted", r, 0.0, 1.0, options.num_measures, seed) for r in options.bound_radii),
        *(
            Case("large_radius", scale, causal, 1.0, n, seed)
            for causal in (0.0, 1.0)
            for scale in options.scales
        ),
        *(Case("cesaro", float(n), 0.0, 1.0, n, seed) for n in options.lengths),
    ]


def measure(case: Case, device: torch.device) -> Result:
    """One statement at one size; tiny matrices, so always on the CPU."""
    del device
    measures = {
        "two_dirac": two_dirac, "weighted": weighted, "large_radius": large_radius, "cesaro": cesaro
    }  # fmt: skip
    return measures[case.statement](case)


def two_dirac(case: Case) -> Result:
    """The lone atom and the cluster of Lemma C.7, D = 1, V = 1."""
    a, radius = torch.tensor([[case.parameter]], dtype=DTYPE), case.size
    rate = castin.two_cluster_rate(a)
    others = case.mass_factor * math.exp(2 * rate * radius**2)
    x = castin.two_cluster_tokens(a, radius, 2)
    mass = torch.tensor([1 / (1 + others), others / (1 + others)], dtype=DTYPE)
    value = castin.mass_splitting(x, mass, a, torch.ones_like(a)).moving.item()
    upper = castin.mean_field_bound(abs(case.parameter), 1.0, radius)
    return Result(value, castin.mean_field_growth(rate, radius), upper, math.nan, math.nan)


def weighted(case: Case) -> Result:
    """Random weighted measures, every other one two opposite atoms under A = −I."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for index in progress(range(case.count), f"measures R={case.size:g}"):
        x, mass, a, v = random_measure(index, case.size, generator)
        value = castin.mass_splitting(x, mass, a, v).moving.item()
        norm_a, norm_v = (torch.linalg.matrix_norm(w, 2).item() for w in (a, v))
        upper = castin.mean_field_bound(norm_a, norm_v, case.size)
        true = castin.differentiated_constant(castin.weighted_attention(mass, a, v), x, mass)
        found.append((value, upper, abs(true / value - 1)))
    values, uppers, checks = torch.tensor(found, dtype=DTYPE).unbind(-1)
    nearest = (values / uppers).argmax()  # a NaN counts as the largest, here and in amax
    value, upper = values[nearest].item(), uppers[nearest].item()
    return Result(value, math.nan, upper, math.nan, checks.amax().item())


def random_measure(
    index: int, radius: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Atoms in B_R, masses of very different sizes, A and V."""
    numbers = {"generator": generator, "dtype": DTYPE}
    n = 2 + index % 4
    x = torch.randn(n, D_MODEL, **numbers)
    x = x * (radius * torch.rand(n, 1, **numbers).sqrt() / x.norm(dim=-1, keepdim=True))
    mass = torch.rand(n, **numbers).pow(4).clamp_min(1e-4)
    a, v = torch.randn(2, D_MODEL, D_MODEL, **numbers) / math.sqrt(D_MODEL)
    if index % 2:
        x = torch.cat([x[:1], -x[:1]])
        mass = mass[:2]
        a, v = -torch.eye(D_MODEL, dtype=DTYPE), torch.eye(D_MODEL, dtype=DTYPE)
    return x, mass / mass.sum(), a, v


def large_radius(case: Case) -> Result:
    """Gaussian tokens and weights, scaled by R; the whole Jacobian is decomposed."""
    generator = torch.Generator().manual_seed(case.seed)
    numbers = {"generator": generator, "dtype": DTYPE}
    n = case.count
    x = torch.randn(n, D_MODEL, **numbers)
    a, v = torch.randn(2, D_MODEL, D_MODEL, **numbers) / math.sqrt(D_MODEL)
    visible = torch.ones(n, n, dtype=torch.bool)
    if case.parameter:
        visible = visible.tril()
    scaled = case.size * x
    dense = dense_jacobian(
        lambda z: castin.dot_product_weights(z, a, visible=visible) @ z @ v.mT, scaled
    )
    value = torch.linalg.matrix_norm(dense, 2).item()
    limit = castin.large_radius_limit(x, a, v, visible).item()
    norm_a, norm_v = (torch.linalg.matrix_norm(w, 2).item() for w in (a, v))
    radius = scaled.norm(dim=-1).max().item()
    upper = castin.ball_bound(norm_a, norm_v, radius, n)
    return Result(value, limit, upper, castin.large_radius_bound(norm_v, n), math.nan)


def cesaro(case: Case) -> Result:
    """Causal attention with A = 0, V = 1, which the masked bound allows and the other would not."""
    n, zero, one = case.count, torch.zeros(1, 1, dtype=DTYPE), torch.ones(1, 1, dtype=DTYPE)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    p = castin.dot_product_weights(torch.zeros(n, 1, dtype=DTYPE), zero, visible=visible)
    value = torch.linalg.matrix_norm(p * one, 2).item()
    upper = castin.mean_field_bound(0.0, 1.0, 1.0, masked=True)
    return Result(value, 2.0, upper, math.nan, math.nan)


def paper_factor(case: Case, result: Result) -> float:
    """What value/predicted should tend to: 4 s^{3/2}/(1 + s)² for two atoms, one elsewhere."""
    s = case.mass_factor
    return 4 * s**1.5 / (1 + s) ** 2 if case.statement == "two_dirac" else 1.0


def ratio(case: Case, result: Result) -> float:
    """Ours over what the statement predicts."""
    return result.value / result.predicted


def share(case: Case, result: Result) -> float:
    """Ours over its bound."""
    return result.value / result.upper


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every number beside its prediction; the verdict weighs the four statements."""
    lines = table(rows, more={"ours/predicted": ratio, "limit of the ratio": paper_factor})
    findings = [*two_dirac_findings(rows), *bound_findings(rows), *limit_findings(rows)]
    ran = set(values(rows, "statement"))
    missing = [name for name in get_args(Statement) if name not in ran]
    outcome = outcome_of(findings)
    why = f"all that ran holds; not run: {', '.join(missing) or 'none'}"
    if failed := [text for holds, text in findings if not holds]:
        why = "not so: " + "; ".join(failed)
        outcome = "not reproduced" if any(text.endswith(EXCEEDED) for text in failed) else outcome
    elif missing and outcome == "reproduced":
        outcome = "partly reproduced"
    paper = (
        "theta(R) -> 1 in theta (gamma/2) R^2 e^(gamma R^2); an upper bound for all measures on "
        "B_R; sqrt(n) ||V|| in the large-radius limit; no numbers are printed"
    )
    ours = "; ".join(text for _, text in findings) or "not run"
    return Summary(lines, paper, ours, outcome, why)


def two_dirac_findings(rows: Rows[Case, Result]) -> list[Finding]:
    """Whether θ comes down to its limit for every A and s, from where R is large enough for one."""
    findings: list[Finding] = []
    large = [
        (c, r)
        for c, r in rows
        if c.statement == "two_dirac" and rate_of(c.parameter) * c.size**2 >= 4
    ]
    for (a, s), group in by(large, "parameter", "mass_factor").items():
        curve = sorted((c.size, ratio(c, r) / paper_factor(c, r)) for c, r in group)
        falls = all(after <= before for (_, before), (_, after) in pairwise(curve))
        radius, last = curve[-1]
        # The next term of theta is of relative size one over the exponent (ours).
        near = 1 <= last <= 1 + 2 / (rate_of(a) * radius**2)
        findings.append((falls and near, f"theta={last:.3f} at R={radius:g} (A={a:g}, s={s:g})"))
    return findings


def bound_findings(rows: Rows[Case, Result]) -> list[Finding]:
    """Whether any value exceeds its bound, and the closed form agrees with differentiation."""
    findings: list[Finding] = []
    chosen = [(share(c, r), r.check) for c, r in rows if c.statement == "weighted"]
    if chosen:
        most, check = torch.tensor(chosen, dtype=DTYPE).amax(0).tolist()  # keeps a NaN
        text = f"at most {most:.3f} of the mean-field bound, autodiff within {check:.0e}"
        findings.append((most <= 1 + ROUNDING and check < 1e-9, text))
    over = sum(
        not r.value <= r.upper * (1 + ROUNDING) or r.predicted > r.ceiling * (1 + ROUNDING)
        for _, r in rows
    )
    return [*findings, (False, f"{over} {EXCEEDED}")] if over else findings


def limit_findings(rows: Rows[Case, Result]) -> list[Finding]:
    """Whether the largest R reaches the limit, and the Cesàro mean stays between 1 and 2."""
    findings: list[Finding] = []
    for (statement, causal), group in by(rows, "statement", "parameter").items():
        case, result = max(group, key=lambda row: row[0].size)
        if statement == "large_radius":
            name, gap = "causal" if causal else "unmasked", abs(ratio(case, result) - 1)
            findings.append((gap < 1e-6, f"{name} limit within {gap:.0e} at R={case.size:g}"))
        if statement == "cesaro":
            held = 1 < result.value < 2
            findings.append((held, f"Cesaro mean {result.value:.3f} at n={case.size:g}"))
    return findings


PANELS: dict[str, tuple[str, str, Name]] = {
    "two_dirac": ("two atoms, D = 1: θ = constant / (γ/2 · R² e^{γR²})", "radius R", ratio),
    "weighted": ("weighted measures: local constant / bound", "radius R", share),
    "large_radius": ("large radius: ‖Df(R X)‖ / its limit", "scale R of the tokens", ratio),
    "cesaro": ("causal, A = 0, the Cesàro mean: local constant", "tokens n", "value"),
}


def draw(rows: Rows[Case, Result]) -> Figure:
    """θ(R); the share of the upper bound; the large-radius limit; the Cesàro mean."""
    figure, axes = panels(2, 2)
    for one, (statement, (title, xlabel, y)) in zip(axes, PANELS.items(), strict=True):
        some = [row for row in rows if row[0].statement == statement]
        curves(one, some, "size", y, ("parameter", "mass_factor"), "A or causal, s =")
        one.axhline(2 if statement == "cesaro" else 1, color="k", label="limit or bound")
        one.set(xlabel=xlabel, title=title, xscale="log" if some else "linear")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
