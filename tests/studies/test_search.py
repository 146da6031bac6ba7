"""The inverse and search find the same text."""

import pytest
import torch

from studies.search import Case, measure


@pytest.mark.parametrize("method", ["inverse", "random", "gradient"])
def test_every_method_finds_the_text(method: str) -> None:
    case = Case(12, 40, method, 12, 16, 0)  # pyright: ignore[reportArgumentType]
    result = measure(case, torch.device("cpu"))
    assert result.recovered == 1
    assert result.proven == (method == "inverse")
