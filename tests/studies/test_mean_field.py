import math
from dataclasses import replace

import pytest
import torch

from studies import mean_field
from studies.mean_field import Case, Options, Result, cases, measure

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> list[tuple[Case, Result]]:
    return [(case, measure(case, CPU)) for case in cases(Options())]


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
