"""Certified stacks beside couplings."""

from pathlib import Path

import pytest
import torch

from studies.coupling import STUDY, singular_values
from studies.study import main
from tests.nn.builders import coupling, random_tokens, trained_a_little


def test_singular_values_of_a_coupling_multiply_to_one() -> None:
    values = singular_values(trained_a_little(coupling()), random_tokens(1)[0, :5])
    assert values.log().sum().item() == pytest.approx(0, abs=1e-8)
    assert values.dtype == torch.float64


def test_the_study_trains_inverts_and_reports(tmp_path: Path) -> None:
    words = ["depths=[1]", "num_steps=2", "num_windows=2", "num_jacobians=1"]
    text = ["data.max_characters=4000", "data.val_characters=190"]
    assert main(STUDY, [*words, *text, f"out={tmp_path}", "wandb=false"]) == 0
