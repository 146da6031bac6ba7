"""Every broken certificate is refuted by its witness, and the right one stands."""

import pytest

from tests.bounds.mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_the_witness_refutes_the_mutant_and_not_the_certificate(name: str) -> None:
    verdict = MUTANTS[name]()
    assert verdict.measured > verdict.claimed, "the mutant survives"
    assert verdict.measured_right <= verdict.right, "the certificate itself is refuted"


def test_there_are_at_least_twelve_mutants() -> None:
    assert len(MUTANTS) >= 12
