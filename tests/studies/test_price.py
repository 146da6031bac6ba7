"""The price of a certificate: which runs are made, which of them count, and what they cost."""

import pytest

from studies.kinds import Case, Result, chosen
from studies.price import draw, summarise


def row(kind: str, rate: float, val: float, test: float, seed: int = 0) -> tuple[Case, Result]:
    case = Case(kind, 2000, rate, seed, "", "")
    return case, Result(1, val, test, 1.0, 1.5, 1000, None, None)


def test_the_rate_is_chosen_on_the_validation_split_and_reported_on_the_test_split() -> None:
    rows = [
        row("twin", 0.01, 1.0, 1.20),
        row("certified", 0.01, 1.0, 1.30),
        row("certified", 0.006, 1.1, 1.10),
    ]
    assert [case.rate for case, _ in chosen(rows, "budget")] == [0.01, 0.01]
    summary = summarise(rows)
    assert [line.get("price") for line in summary.table] == [None, pytest.approx(0.1)]
    assert summary.outcome == "not reproduced"
    assert summarise([rows[0], row("certified", 0.01, 1.0, 1.205)]).outcome == "reproduced"
    curves = [line.get_label() for line in draw(rows).axes[0].lines]
    assert curves == ["twin", "certified", "5-gram"]


def test_the_mean_of_all_seeds_counts() -> None:
    rows = [row("twin", 0.01, 1.0, 1.2), row("twin", 0.01, 1.0, 1.4, seed=1)]
    (line,) = summarise(rows).table
    assert (line["test"], line["s"]) == pytest.approx((1.3, 0.1414), abs=1e-4)
