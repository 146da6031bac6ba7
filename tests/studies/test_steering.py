"""Preimages of steered states."""

import pytest
import torch

from invformer.errors import ConfigurationError
from studies import steering
from studies.states import undoing
from studies.steering import Case, Options, measure
from tests.support.builders import baseline


@pytest.mark.usefixtures("certified")
def test_a_change_of_text_meets_texts_at_both_ends_and_no_random_one_does() -> None:
    def farthest(vector: steering.Vector, strength: float) -> float:
        return measure(Case("ours", vector, strength, "a", 3, 8, 0), torch.device("cpu")).largest

    assert farthest("text", 0.0) < 1e-3
    assert farthest("text", 1.0) < 1e-3 < farthest("text", 0.5)
    assert 1e-3 < farthest("random", 0.1) < farthest("random", 1.0)


def test_a_mark_without_meaning_and_a_model_without_inverse_are_refused(certified: None) -> None:
    with pytest.raises(ConfigurationError, match="mark: 'ab' is not a character"):
        Options(mark="ab")
    with pytest.raises(ConfigurationError, match="mark: all texts or none"):
        measure(Case("ours", "mean difference", 1.0, "a", 3, 1, 0), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="no inverse"):
        undoing(baseline())
