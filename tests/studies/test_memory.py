"""Three ways to a gradient."""

from dataclasses import replace

import pytest

from studies import memory
from studies.memory import Case, Options, Result, cases, draw, measured, summarise


@pytest.mark.parametrize("kind", memory.SHAPES)
def test_recomputing_by_checkpoint_or_inverse_gives_the_stored_gradient(kind: str) -> None:
    case = Case(kind, 2, "store", 2, 1, 0, None)
    assert measured(case).gradient_error == 0
    assert measured(replace(case, strategy="checkpoint")).gradient_error < 1e-6
    assert measured(replace(case, strategy="inverse")).gradient_error < 1e-3


def test_checkpointing_wins_for_the_certified_model_or_the_verdict_says_so() -> None:
    def rows(seconds: float) -> list[tuple[Case, Result]]:
        chosen = cases(Options(depths=[1]))
        return [(c, Result(9.0, seconds if c.strategy == "inverse" else 2.0, 0.0)) for c in chosen]

    assert summarise(rows(3.0)).outcome == "reproduced"
    assert summarise(rows(1.0)).outcome == "not reproduced"
    assert draw(rows(3.0)).axes
