"""Three ways to a gradient."""

from dataclasses import replace

import pytest

from studies import memory
from studies.memory import Case, measured


@pytest.mark.parametrize("kind", memory.KINDS)
def test_recomputing_by_checkpoint_or_inverse_gives_the_stored_gradient(kind: str) -> None:
    case = Case(kind, 2, "store", 2, 1, 0, None)
    assert measured(case).gradient_error == 0
    assert measured(replace(case, strategy="checkpoint")).gradient_error < 1e-6
    assert measured(replace(case, strategy="inverse")).gradient_error < 1e-3
