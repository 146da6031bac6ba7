"""An evaluation and its file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from invformer.evaluation.result import Evaluation
from invformer.runs.files import write_json
from tests.support.saved_runs import Saved

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.mark.parametrize("words", [(), ("model=dot_product",), ("model=causal_bounded",)])
def test_an_evaluation_comes_back_from_its_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = Saved(tmp_path, *words).evaluated()
    if found.inversion:  # JSON has no infinity
        found = replace(found, inversion=replace(found.inversion, error_bound=math.inf))
    write_json(found.to_json(), tmp_path / "found.json")
    kept = json.loads((tmp_path / "found.json").read_text())
    again = Evaluation.from_json(kept)
    if found.inversion and again.inversion:
        assert math.isnan(again.inversion.error_bound)
        again = replace(again, inversion=replace(again.inversion, error_bound=math.inf))
    assert again == found


def test_a_file_of_0_1_is_read_and_one_of_something_else_is_not(tmp_path: Path) -> None:
    found = Saved(tmp_path).evaluated()
    kept = found.to_json()
    old = {**kept, "perf": {"forward_characters_per_second": 9.0}}
    tried = old["inversion"].pop("characters_tried")
    old["inversion"]["seconds_forward"] = 0.1
    read = Evaluation.from_json(old)
    assert found.inversion
    assert read.inversion == replace(found.inversion, characters_tried=None)
    assert tried
    for other in ({}, {**kept, "data": 3}, []):
        with pytest.raises((LookupError, TypeError, AttributeError)):
            Evaluation.from_json(other)  # type: ignore[arg-type]
