"""The inverse and search find the same text."""

from pathlib import Path

import pytest
import torch

from studies.search import STUDY, Case, measure
from studies.study import main


@pytest.mark.parametrize("method", ["inverse", "random", "gradient"])
def test_every_method_finds_the_text(method: str) -> None:
    case = Case(12, 40, method, 12, 16, "float64", 0)  # pyright: ignore[reportArgumentType]
    result = measure(case, torch.device("cpu"))
    assert result.recovered == 1
    assert result.proven == (method == "inverse")


def test_the_study_reports(tmp_path: Path) -> None:
    sizes = ["lengths=[8]", "vocabularies=[9,30]", "num_places=2", "d_model=16"]
    assert main(STUDY, [*sizes, f"out={tmp_path}", "wandb=false"]) == 0
