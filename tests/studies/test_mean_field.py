import math
from dataclasses import replace

import pytest
import torch

from studies import mean_field
from studies.mean_field import Case, Options, cases, measure

CPU = torch.device("cpu")


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
    result = measure(Case("two_dirac", radius, eigenvalue, 1.0, 2, 0), CPU)
    assert result.value / result.predicted == pytest.approx(ratio, abs=0.005)
    assert result.value <= result.upper


def test_three_times_the_published_mass_ratio_is_better_and_no_other_is_better_still() -> None:
    def factor(s: float) -> float:
        result = measure(Case("two_dirac", 12.0, -1.0, s, 2, 0), CPU)
        return result.value / result.predicted

    assert factor(3.0) == pytest.approx(4 * 3**1.5 / 16, rel=0.01)
    assert factor(3.0) > max(factor(1.0), factor(2.5), factor(3.6), factor(8.0))


def test_no_random_measure_exceeds_the_bound_and_the_closed_form_is_differentiation() -> None:
    result = measure(Case("weighted", 1.0, 0.0, 1.0, 40, 3), CPU)
    assert 0.02 < result.value / result.upper <= 1
    assert result.check < 1e-11


@pytest.mark.parametrize("causal", [0.0, 1.0])
def test_far_out_the_constant_is_its_limit_and_nearer_it_is_not(causal: float) -> None:
    far = measure(Case("large_radius", 3e4, causal, 1.0, 8, 1), CPU)
    near = measure(Case("large_radius", 0.1, causal, 1.0, 8, 1), CPU)
    assert far.value == pytest.approx(far.predicted, rel=1e-6)
    assert far.predicted <= far.ceiling * (1 + 1e-5)
    assert abs(near.value / near.predicted - 1) > 0.01


def test_the_cesaro_mean_exceeds_the_unmasked_constant() -> None:
    values = [measure(Case("cesaro", float(n), 0.0, 1.0, n, 0), CPU).value for n in (2, 100)]
    assert values == pytest.approx([1.144, 1.630], abs=1e-3)


@pytest.mark.parametrize(("value", "check"), [(2.0, 0.0), (math.nan, 0.0), (0.5, math.nan)])
def test_a_broken_bound_or_no_number_is_not_reproduced(value: float, check: float) -> None:
    case = Case("weighted", 1.0, 0.0, 1.0, 5, 0)
    good = mean_field.Result(0.5, math.nan, 1.0, math.nan, 0.0)
    bad = replace(good, value=value, check=check)
    for rows in ([(case, bad)], [(case, good), (case, bad)], [(case, bad), (case, good)]):
        assert mean_field.summarise(rows).outcome == "not reproduced"


NOTHING = Options(radii=[], bound_radii=[], scales=[], lengths=[], num_measures=2, num_tokens=6)


def verdict_of(**changed: object) -> tuple[str, str]:
    rows = [(case, measure(case, CPU)) for case in cases(replace(NOTHING, **changed))]
    summary = mean_field.summarise(rows)
    return summary.outcome, summary.why


def test_the_verdict_speaks_of_the_statements_that_ran_and_of_no_other() -> None:
    outcome, why = verdict_of(lengths=[10])
    assert outcome == "partly reproduced"
    assert why == "all that ran holds; not run: two_dirac, weighted, large_radius"
    outcome, why = verdict_of(radii=[6.0, 8.0], bound_radii=[1.0], scales=[1e4], lengths=[2, 10])
    assert outcome == "reproduced"
