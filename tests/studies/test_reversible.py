"""Certified stacks beside couplings."""

import pytest
import torch

from studies.coupling import singular_values
from tests.nn.builders import coupling, random_tokens, trained_a_little


def test_singular_values_of_a_coupling_multiply_to_one() -> None:
    values = singular_values(trained_a_little(coupling()), random_tokens(1)[0, :5])
    assert values.log().sum().item() == pytest.approx(0, abs=1e-8)
    assert values.dtype == torch.float64
