"""The price of a certificate: which runs are made, which of them count, and what they cost."""

from pathlib import Path

import pytest
import torch

from studies import kinds
from studies.kinds import Case, Result, chosen, command
from studies.price import Options, cases, draw, summarise


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


def test_every_kind_is_trained_at_every_budget_and_rate() -> None:
    options = Options(
        budgets=[10, 20], rates=[0.01, 0.02], num_seeds=2, overrides=["data.path=a b"]
    )
    found = cases(options)
    assert len(found) == 16 == len({case.run for case in found})
    words = {"trainer.max_steps=10", "optim.muon_lr=0.02", "data.path=a b"}
    assert words <= set(command(found[2]))


def test_a_run_that_overfits_counts_with_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("twin", 2000, 0.01, 0, "", str(tmp_path))
    (case.run / "evaluation").mkdir(parents=True)
    (case.run / "evaluation" / "ptb-test-1500.json").write_text('{"nats": 1.2}')
    monkeypatch.setattr(kinds, "call", lambda *words: None)
    assert kinds.evaluated(case, "test", torch.device("cpu")) == {"nats": 1.2}
