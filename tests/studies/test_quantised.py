"""Rounded weights: their size, and the certificate of what is left."""

from studies.quantised import Case, Result, summarise


def test_a_certificate_that_fails_fails_the_verdict() -> None:
    def outcome(bound: float, proven: float) -> str:
        result = Result("certified", 1.0, 1.8, bound, 0.5, 1.0, proven)
        return summarise([(Case("a", 4, 1, None, 0), result)]).outcome

    assert outcome(0.5, 1.0) == "reproduced"
    assert outcome(0.51, 1.0) == outcome(0.5, 0.9) == "not reproduced"
