"""Preimages of steered states."""

import pytest
import torch

from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.model import TrainedModel
from studies import steering
from studies.steering import Case, measure
from tests.nn.builders import random_tokens, scaled_model, trained_a_little


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    network = trained_a_little(scaled_model()).double()
    found = TrainedModel(network, Vocabulary.from_text("abcdefghij"), TrainConfig(), {})
    monkeypatch.setattr(steering, "trained", lambda folder: found)
    monkeypatch.setattr(steering, "windows", lambda folder, count: random_tokens(count))


def test_a_change_of_text_meets_texts_at_both_ends_and_no_random_one_does() -> None:
    def farthest(vector: steering.Vector, strength: float) -> float:
        return measure(Case("ours", vector, strength, "a", 3, 8, 0), torch.device("cpu")).largest

    assert farthest("text", 0.0) < 1e-3
    assert farthest("text", 1.0) < 1e-3 < farthest("text", 0.5)
    assert 1e-3 < farthest("random", 0.1) < farthest("random", 1.0)
