"""Castin et al. 2024: how attention on probability measures grows, and where it stops growing.

Four statements about F: μ ↦ (Γ_μ)_# μ, its local constant at Σ m_j δ_{x_j} being ‖Df_m(X)‖_m, the
norm of weighted attention (Lemma C.5):

``two_dirac``     (Prop. 3.6) two atoms on B_R reach θ(R) (γ/2) R² e^{γR²} with θ → 1, γ the rate of
                  A; masses of the ratio s e^{2γR²} give a factor 4 s^{3/2}/(1 + s)² (ours).
``weighted``      (Thm 3.5) no weighted measure on B_R exceeds ‖V‖ (1 + 3‖A‖R²) e^{2‖A‖R²}; random
                  ones and two atoms.
``large_radius``  (Thm 3.7) ‖Df(R X)‖ → ‖V‖ (max_j #φ⁻¹(j))^½ ≤ √n ‖V‖, masked or not.
``cesaro``        (Thm 4.4) causal attention with A = 0 is the Cesàro mean, whose norm tends to 2.

Reproduced means that all four hold: θ falls to its limit, no constant exceeds its bound or is NaN,
the largest R is within 1e-6 of the limit, the Cesàro norm lies between 1 and 2.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch
from torch.linalg import matrix_norm as norm

from studies import castin
from studies.report import Finding, Rows, Summary, by, table, values
from studies.study import Study, StudyOptions, program

Statement = Literal["two_dirac", "weighted", "large_radius", "cesaro"]
NUM_MEASURES = 150  # random ones, for every R of ``weighted``
NUM_TOKENS = 48  # n of ``large_radius``
D_MODEL = 4  # of random tokens and weights
ROUNDING = 1e-12  # by how much a measured norm may exceed a bound before it counts
DTYPE = torch.float64

# Parameters, factors s of the ratio of the masses, and sizes of every statement.
GRIDS: dict[Statement, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "two_dirac": ((-1.0, 1.0), (1.0, 3.0), (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)),
    "weighted": ((0.0,), (1.0,), (0.1, 0.3, 1.0)),
    "large_radius": ((0.0, 1.0), (1.0,), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)),
    "cesaro": ((0.0,), (1.0,), (2.0, 10.0, 100.0, 1000.0)),
}


class Options(StudyOptions):
    """Attention as a map of measures: growth with the radius, its bounds and its limits."""


@dataclass(frozen=True)
class Case:
    """One number, and what it is compared with.

    ``size`` is R, or n for ``cesaro``; ``parameter`` is A of two atoms (D = 1), and for
    ``large_radius`` 1 if causal.
    """

    statement: Statement
    size: float
    parameter: float
    mass_factor: float
    seed: int

    @property
    def rate(self) -> float:
        """γ for D = 1 (Prop. 3.4)."""
        return max(-self.parameter, self.parameter / 8)

    @property
    def limit(self) -> float:
        """What value/predicted should tend to: 4 s^{3/2}/(1 + s)², which is one for s = 1."""
        return 4 * self.mass_factor**1.5 / (1 + self.mass_factor) ** 2


@dataclass(frozen=True)
class Result:
    """A local constant between what should reach it and what should bound it."""

    value: float  # ‖Df_m(X)‖_m; for ``weighted`` of the measure that comes nearest to the bound
    predicted: float  # the size, limit or norm the statement names; NaN for ``weighted``
    upper: float  # the proven bound that the value must not exceed, if there is one

    @property
    def ratio(self) -> float:
        """Ours over what the statement predicts."""
        return self.value / self.predicted

    @property
    def share(self) -> float:
        """Ours over its bound."""
        return self.value / self.upper


def cases(options: Options) -> list[Case]:
    """Every statement at every size."""
    return [
        Case(statement, size, parameter, factor, options.seed)
        for statement, grid in GRIDS.items()
        for parameter, factor, size in product(*grid)
    ]


def measure(case: Case, device: torch.device) -> Result:
    """One statement at one size; tiny matrices, so always on the CPU."""
    return STATEMENTS[case.statement](case)


def two_dirac(case: Case) -> Result:
    """The lone atom and the cluster of Lemma C.7, D = 1, V = 1."""
    radius = case.size
    a, exponent = torch.tensor([[case.parameter]], dtype=DTYPE), case.rate * radius**2
    others = case.mass_factor * math.exp(2 * exponent)
    mass = torch.tensor([1.0, others], dtype=DTYPE) / (1 + others)
    x = castin.two_cluster_tokens(a, radius, 2)
    moving, _ = castin.mass_splitting(x, mass, a, torch.ones_like(a))
    upper = castin.mean_field_bound(abs(case.parameter), 1.0, radius)
    return Result(moving.item(), exponent / 2 * math.exp(exponent), upper)


def weighted(case: Case) -> Result:
    """Random weighted measures, every other one two opposite atoms under A = −I."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for index in range(NUM_MEASURES):
        x, mass, a, v = random_measure(index, case.size, generator)
        value = castin.mass_splitting(x, mass, a, v).moving.item()
        upper = castin.mean_field_bound(norm(a, 2).item(), norm(v, 2).item(), case.size)
        found.append((value, upper))
    values, uppers = torch.tensor(found, dtype=DTYPE).unbind(-1)
    nearest = (values / uppers).argmax()  # a NaN counts as the largest
    return Result(values[nearest].item(), math.nan, uppers[nearest].item())


def random_measure(index: int, radius: float, generator: torch.Generator) -> castin.Measure:
    """Atoms in B_R, masses of very different sizes, A and V."""
    numbers = {"generator": generator, "dtype": DTYPE}
    n = 2 + index % 4
    x = torch.randn(n, D_MODEL, **numbers)
    x = x * (radius * torch.rand(n, 1, **numbers).sqrt() / x.norm(dim=-1, keepdim=True))
    mass = torch.rand(n, **numbers).pow(4).clamp_min(1e-4)
    a, v = torch.randn(2, D_MODEL, D_MODEL, **numbers) / math.sqrt(D_MODEL)
    if index % 2:
        x, mass = torch.cat([x[:1], -x[:1]]), mass[:2]
        a, v = -torch.eye(D_MODEL, dtype=DTYPE), torch.eye(D_MODEL, dtype=DTYPE)
    return x, mass / mass.sum(), a, v


def large_radius(case: Case) -> Result:
    """Gaussian tokens and weights, scaled by R; the whole Jacobian is decomposed."""
    numbers = {"generator": torch.Generator().manual_seed(case.seed), "dtype": DTYPE}
    x = torch.randn(NUM_TOKENS, D_MODEL, **numbers)
    a, v = torch.randn(2, D_MODEL, D_MODEL, **numbers) / math.sqrt(D_MODEL)
    visible = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    visible = visible.tril() if case.parameter else visible
    scaled, ones = case.size * x, torch.ones(NUM_TOKENS, dtype=DTYPE)
    value = castin.differentiated_constant(castin.attention(a, v, visible=visible), scaled, ones)
    limit = castin.large_radius_limit(x, a, v, visible).item()
    return Result(value, limit, math.inf)


def cesaro(case: Case) -> Result:
    """Causal attention with A = 0, V = 1, which the masked bound allows and the other would not."""
    n, zero = int(case.size), torch.zeros(1, 1, dtype=DTYPE)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    p = castin.dot_product_weights(zero.expand(n, 1), zero, visible=visible)
    return Result(norm(p, 2).item(), 2.0, castin.mean_field_bound(0.0, 1.0, 1.0, masked=True))


STATEMENTS = {
    "two_dirac": two_dirac, "weighted": weighted, "large_radius": large_radius, "cesaro": cesaro,
}  # fmt: skip


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every number beside its prediction; the verdict weighs the four statements."""
    groups = by(rows, "statement", "parameter", "mass_factor").values()
    over = sum(not result.share <= 1 + ROUNDING for _, result in rows)
    return Summary(
        table(rows, more={"ours/predicted": "ratio", "limit of the ratio": "limit"}),
        [finding(group) for group in groups],
        must=[(over == 0, f"{over} values exceed their bound or are no number")],
    )


def finding(group: Rows[Case, Result]) -> Finding:
    """Whether a statement holds for one parameter and factor; limits at the largest size."""
    case, result = group[-1]
    a, s, size = case.parameter, case.mass_factor, case.size
    if case.statement == "two_dirac":  # from where R is large enough for a limit
        theta = [r.ratio / c.limit for c, r in group if case.rate * c.size**2 >= 4]
        falls = all(after <= before for before, after in pairwise(theta))
        # The next term of theta is of relative size one over the exponent (ours).
        near = 1 <= theta[-1] <= 1 + 2 / (case.rate * size**2)
        return falls and near, f"theta={theta[-1]:.3f} at R={size:g} (A={a:g}, s={s:g})"
    if case.statement == "weighted":
        shares = torch.tensor(values(group, "share"), dtype=DTYPE)
        most = shares.amax().item()  # keeps a NaN
        return most <= 1 + ROUNDING, f"at most {most:.3f} of the mean-field bound"
    if case.statement == "large_radius":
        name, gap = "causal" if a else "unmasked", abs(result.ratio - 1)
        return gap < 1e-6, f"{name} limit within {gap:.0e} at R={size:g}"
    return 1 < result.value < 2, f"Cesaro mean {result.value:.3f} at n={size:g}"


STUDY = program(Study(Options, Case, Result, cases, measure, summarise))
