"""Certified stacks beside couplings."""

from types import SimpleNamespace

import pytest
import torch

from studies import coupling as module
from studies.coupling import singular_values
from tests.support.builders import coupling, random_tokens, trained_a_little


def test_singular_values_of_a_coupling_multiply_to_one() -> None:
    values = singular_values(trained_a_little(coupling()), random_tokens(1)[0, :5])
    assert values.log().sum().item() == pytest.approx(0, abs=1e-8)
    assert values.dtype == torch.float64


def test_a_run_that_overfits_counts_with_the_loss_of_its_best_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SimpleNamespace(network=trained_a_little(coupling()).double())
    monkeypatch.setattr(module, "trained", lambda folder: run)
    monkeypatch.setattr(module, "windows", lambda folder, count: random_tokens(count))
    rows = [{"val/nats": 3.0}, {"val/nats": 2.0}, {"val/nats": 2.5}]
    monkeypatch.setattr(module, "validations", lambda folder: rows)
    options = module.Options(models=["run"], depths=[], num_jacobians=0, num_windows=1)
    (case,) = module.cases(options)
    assert module.measure(case, torch.device("cpu")).nats == 2.0
