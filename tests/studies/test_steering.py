"""Preimages of steered states."""

import pytest
import torch

from studies import steering
from studies.steering import Case, measure


@pytest.mark.usefixtures("certified")
def test_a_change_of_text_meets_texts_at_both_ends_and_no_random_one_does() -> None:
    def farthest(vector: steering.Vector, strength: float) -> float:
        return measure(Case("ours", vector, strength, "a", 3, 8, 0), torch.device("cpu")).largest

    assert farthest("text", 0.0) < 1e-3
    assert farthest("text", 1.0) < 1e-3 < farthest("text", 0.5)
    assert 1e-3 < farthest("random", 0.1) < farthest("random", 1.0)
