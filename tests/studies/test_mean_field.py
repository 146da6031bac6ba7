import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies import castin, mean_field
from studies.mean_field import STUDY, Case, Options, cases, measure
from studies.study import run

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


def test_two_atoms_agree_with_automatic_differentiation() -> None:
    a, one = -torch.ones(1, 1), torch.ones(1, 1)
    x, mass = torch.tensor([[-1.5], [1.5]]), torch.tensor([0.02, 0.98])
    f = castin.weighted_attention(mass, a, one)
    value = castin.differentiated_constant(f, x, mass)
    # The same number written out: rows differ only by which atom looks.
    weights = torch.stack([mass * torch.exp(-x[i] * x[:, 0]) for i in range(2)])
    p = weights / weights.sum(1, keepdim=True)
    m = p @ x[:, 0]
    offset = x[:, 0] - m[:, None]
    jacobian = p * (1 - offset * x) - torch.diag((p * offset.square()).sum(1))
    scaled = mass.sqrt()[:, None] * jacobian / mass.sqrt()
    assert value == pytest.approx(torch.linalg.matrix_norm(scaled, 2).item())


def test_no_random_measure_exceeds_the_bound_and_the_closed_form_is_differentiation() -> None:
    result = measure(Case("weighted", 1.0, 0.0, 1.0, 40, 3), CPU)
    assert 0.02 < result.value / result.upper <= 1
    assert result.check < 1e-11


@pytest.mark.parametrize("causal", [0.0, 1.0])
def test_far_out_the_constant_is_its_limit_and_nearer_it_is_not(causal: float) -> None:
    far = measure(Case("large_radius", 3e4, causal, 1.0, 8, 1), CPU)
    near = measure(Case("large_radius", 0.1, causal, 1.0, 8, 1), CPU)
    assert far.value == pytest.approx(far.predicted, rel=1e-6)
    assert abs(near.value / near.predicted - 1) > 0.01


def test_the_cesaro_mean_exceeds_the_unmasked_constant() -> None:
    values = [measure(Case("cesaro", float(n), 0.0, 1.0, n, 0), CPU).value for n in (2, 100)]
    assert values == pytest.approx([1.144, 1.630], abs=1e-3)


def test_the_study_runs_from_start_to_figure_and_reproduces_the_paper(tmp_path: Path) -> None:
    options = Options(
        out=str(tmp_path), radii=[2.0, 4.0, 6.0], num_measures=6, bound_radii=[1.0],
        scales=[1.0, 1e4], num_tokens=6, lengths=[2, 5], num_threads=1,
        wandb=False,
    )  # fmt: skip
    summary = run(STUDY, options)
    assert summary.outcome == "reproduced", summary.verdict
    assert (tmp_path / "mean_field.png").stat().st_size > 10_000


@pytest.mark.parametrize(("value", "check"), [(2.0, 0.0), (math.nan, 0.0), (0.5, math.nan)])
def test_a_broken_bound_or_no_number_is_not_reproduced(value: float, check: float) -> None:
    case = Case("weighted", 1.0, 0.0, 1.0, 5, 0)
    good = mean_field.Result(0.5, math.nan, 1.0, math.nan, 0.0)
    bad = replace(good, value=value, check=check)
    for rows in ([(case, bad)], [(case, good), (case, bad)], [(case, bad), (case, good)]):
        assert mean_field.summarise(rows).outcome == "not reproduced"


def test_one_measure_that_is_no_number_reaches_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0.1, math.nan, 0.2])
    monkeypatch.setattr(castin, "differentiated_constant", lambda *_: next(numbers))
    assert math.isnan(measure(Case("weighted", 1.0, 0.0, 1.0, 3, 0), CPU).check)


NOTHING = Options(radii=[], bound_radii=[], scales=[], lengths=[], num_measures=2, num_tokens=6)


def verdict_of(**changed: object) -> tuple[str, str]:
    rows = [(case, measure(case, CPU)) for case in cases(replace(NOTHING, **changed))]
    summary = mean_field.summarise(rows)
    return summary.outcome, summary.why


def test_the_verdict_speaks_of_the_statements_that_ran_and_of_no_other() -> None:
    outcome, why = verdict_of(lengths=[10])
    assert outcome == "partly reproduced"
    assert why == "no bound is exceeded; not run: two_dirac, weighted, large_radius"
    outcome, why = verdict_of(radii=[8.0], mass_factors=[1.0], lengths=[10])
    assert outcome == "partly reproduced"
    assert "theta is about 1 at the one radius and no bound is exceeded" in why
    assert not {"decreases", "three", "limit"} & set(why.split())
    outcome, why = verdict_of(radii=[6.0, 8.0], bound_radii=[1.0], scales=[1e4], lengths=[2, 10])
    assert outcome == "reproduced"
    assert why.startswith("theta decreases to 1 and no bound is exceeded; three times")
    assert why.endswith("below sqrt(n) ||V||")


def test_a_bound_is_exceeded_by_more_than_rounding() -> None:
    case = Case("cesaro", 2.0, 0.0, 1.0, 2, 0)
    good = mean_field.Result(1.0 + 2e-16, 2.0, 1.0, math.nan, math.nan)
    assert mean_field.bound_findings([(case, good)]) == []
    (finding,) = mean_field.bound_findings([(case, replace(good, value=1.0 + 1e-9))])
    assert finding == (False, "1 values exceed their bound or are no number")
