"""What tests of studies share."""

import pytest

from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.trained.model import TrainedModel
from studies import damage
from tests.support.builders import random_tokens, scaled_model, trained_a_little


@pytest.fixture
def certified(monkeypatch) -> None:
    """A small certified model and random texts in the place of every run folder's."""
    network = trained_a_little(scaled_model()).double()
    found = TrainedModel(network, Vocabulary.from_text("abcdefghij"), TrainConfig(), {})
    monkeypatch.setattr(damage, "trained", lambda folder: found)
    monkeypatch.setattr(damage, "windows", lambda folder, count: random_tokens(count))
