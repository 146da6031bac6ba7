"""Three ways to a gradient."""

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from studies import memory
from studies.memory import Case, measure, measured


@pytest.mark.parametrize("kind", memory.KINDS)
def test_recomputing_by_checkpoint_or_inverse_gives_the_stored_gradient(kind: str) -> None:
    case = Case(kind, 2, "store", 2, 1, 0, None)
    assert measured(case).gradient_error == 0
    assert measured(replace(case, strategy="checkpoint")).gradient_error < 1e-6
    assert measured(replace(case, strategy="inverse")).gradient_error < 1e-3


def measured_and_handler(case: Case) -> Any:
    return measured(case), signal.getsignal(signal.SIGINT)


def test_a_case_has_a_process_and_a_peak_of_its_own_and_leaves_ctrl_c_to_the_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "step", None)  # in this process alone
    monkeypatch.setattr(memory, "measured", measured_and_handler)
    before = signal.getsignal(signal.SIGINT)
    large = torch.ones(2**28, dtype=torch.float32)  # of this process, not of the case's
    case = Case("certified", 1, "store", 16, 1, 0, 1)
    found, handler = measure(case, torch.device("cpu"))  # type: ignore[misc]
    assert found.gradient_error == 0
    assert 1 < found.peak < large.nbytes / 2**20 <= memory.resident()
    assert (handler, signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, before)
