"""Rounded weights: their size, and the certificate of what is left."""

import pytest
import torch

from invformer.nn.proof import enforce
from studies.quantised import Case, Result, in_bits, summarise
from tests.support.builders import baseline, coupling, scaled_model, trained_a_little


@pytest.mark.parametrize("make", [scaled_model, baseline, coupling])
def test_eight_bits_are_a_quarter_of_the_size_and_change_little(make) -> None:
    model = trained_a_little(make()).float()
    (whole, size), (small, fewer) = (in_bits(model, bits) for bits in (32, 8))
    assert size == sum(4 * p.numel() for p in model.parameters()) / 1024
    assert size / 4 < fewer < size
    tokens = torch.arange(10)[None]
    torch.testing.assert_close(small(tokens), whole(tokens), rtol=0.1, atol=0.1)


def test_the_certificate_holds_for_the_rounded_weights() -> None:
    model, _ = in_bits(trained_a_little(scaled_model()).float(), 3)
    assert enforce(model, dtype=torch.float32).holds


def test_a_certificate_that_fails_fails_the_verdict() -> None:
    def outcome(bound: float, proven: float) -> str:
        result = Result("certified", 1.0, 1.8, bound, 0.5, 1.0, proven)
        return summarise([(Case("a", 4, 1, None, 0), result)]).outcome

    assert outcome(0.5, 1.0) == "reproduced"
    assert outcome(0.51, 1.0) == outcome(0.5, 0.9) == "not reproduced"
