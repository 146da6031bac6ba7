import math
from dataclasses import replace

import pytest
import torch

from studies import mean_field
from studies.mean_field import Case, Options, Result, Statement, cases, measure

CPU = torch.device("cpu")


def measured(
    statement: Statement, size: float, parameter: float = 0.0, factor: float = 1.0
) -> Result:
    return measure(Case(statement, size, parameter, factor, 0), CPU)


@pytest.fixture(scope="module")
def rows() -> list[tuple[Case, Result]]:
    return [(case, measure(case, CPU)) for case in cases(Options())]


@pytest.mark.parametrize(
    ("eigenvalue", "radius", "ratio"),
    [
        (-1.0, 2.0, 1.25),
        (-1.0, 4.0, 1.063),
        (-1.0, 8.0, 1.016),
        (1.0, 6.0, 1.22),
        (1.0, 8.0, 1.125),
    ],
)
def test_two_atoms_reach_the_published_growth(
    eigenvalue: float, radius: float, ratio: float
) -> None:
    result = measured("two_dirac", radius, eigenvalue)
    assert result.value / result.predicted == pytest.approx(ratio, abs=0.005)
    assert result.value <= result.upper


def test_three_times_the_published_mass_ratio_is_better_and_no_other_is_better_still() -> None:
    def factor(s: float) -> float:
        result = measured("two_dirac", 12.0, -1.0, s)
        return result.value / result.predicted

    assert factor(3.0) == pytest.approx(4 * 3**1.5 / 16, rel=0.01)
    assert factor(3.0) > max(factor(1.0), factor(2.5), factor(3.6), factor(8.0))


@pytest.mark.parametrize("causal", [0.0, 1.0])
def test_far_out_the_constant_is_its_limit_and_nearer_it_is_not(causal: float) -> None:
    far = measured("large_radius", 3e4, causal)
    near = measured("large_radius", 0.1, causal)
    assert far.value == pytest.approx(far.predicted, rel=1e-6)
    assert abs(near.value / near.predicted - 1) > 0.01
    generator = torch.Generator().manual_seed(0)
    torch.randn(mean_field.NUM_TOKENS, 4, generator=generator, dtype=torch.float64)  # the tokens
    v = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)[1] / 2
    assert far.predicted <= math.sqrt(mean_field.NUM_TOKENS) * mean_field.norm(v)


def test_all_four_statements_hold(rows: list[tuple[Case, Result]]) -> None:
    assert mean_field.summarise(rows).outcome == "reproduced"
    assert all(r.value > 0.02 * r.upper for c, r in rows if c.statement == "weighted")


@pytest.mark.parametrize(
    ("statement", "wrong", "outcome"),
    [
        ("weighted", {"value": 1e9}, "not reproduced"),
        ("weighted", {"value": math.nan}, "not reproduced"),
        ("two_dirac", {"predicted": 1e9}, "partly reproduced"),
        ("large_radius", {"predicted": 1.0}, "partly reproduced"),
        ("cesaro", {"value": 1.0}, "partly reproduced"),
    ],
)
def test_a_statement_that_fails_is_named(
    rows: list[tuple[Case, Result]], statement: str, wrong: dict[str, float], outcome: str
) -> None:
    changed = [(c, replace(r, **wrong) if c.statement == statement else r) for c, r in rows]
    summary = mean_field.summarise(changed)
    assert summary.outcome == outcome
    assert "fails:" in str(summary)
