"""Which checkpoint of a run folder is evaluated, and the file of an evaluation."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from invformer.evaluation.result import Evaluation
from invformer.runs.checkpoint import MANIFEST, MODEL, STATE_TENSORS, WEIGHTS, read_checkpoint
from invformer.runs.files import write_json
from tests.runs.hostile import edit_json, flipped
from tests.support.saved_runs import NO_STATE, Saved, write_checkpoint

BEST, NEWEST = "step-00000004", "step-00000006"
IS_GONE = r"checkpoints: the best checkpoint is not there any more"


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """Three checkpoints of a run, the second of which is the best."""
    for step in (2, 4, 6):
        metadata = {"step": step, "config": {}, "vocabulary": {}, "data_sha256": "", "best": BEST}
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        write_checkpoint(path, metadata, {"w": torch.ones(9)}, NO_STATE)
    return tmp_path / "checkpoints"


def damaged(checkpoint: str, name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / checkpoint / name
        file.write_bytes(flipped(file.read_bytes()))

    return damage


def linked(folder: Path) -> None:
    (folder / BEST).rename(folder.parent / "elsewhere")
    (folder / BEST).symlink_to(folder.parent / "elsewhere")


def naming(best: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / NEWEST, MODEL, lambda m: m.update(best=best))


@pytest.mark.parametrize(
    ("do", "taken", "why"),
    [
        (damaged("step-00000002", WEIGHTS), BEST, None),
        *((damaged(BEST, name), NEWEST, BEST) for name in (WEIGHTS, STATE_TENSORS, MANIFEST)),
        (lambda folder: shutil.rmtree(folder / BEST), NEWEST, IS_GONE),
        (linked, NEWEST, IS_GONE),
        *((naming(best), NEWEST, IS_GONE) for best in ("../../elsewhere", "/etc", 3, "")),
        (damaged(NEWEST, WEIGHTS), BEST, NEWEST),
    ],
)
def test_the_best_is_taken_and_a_warning_says_why_it_is_not(
    checkpoints, do: Callable, taken: str, why: str, caplog
) -> None:
    do(checkpoints)
    assert read_checkpoint(str(checkpoints.parent)).path.name == taken
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (why is not None)
    end = "" if taken == BEST else ", the newest, not the best"
    assert all(re.search(rf"{why}.*; taking {taken}{end}$", line) for line in said)


pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.mark.parametrize("words", [(), ("model=dot_product",), ("model=causal_bounded",)])
def test_an_evaluation_comes_back_from_its_file(tmp_path, words: tuple[str, ...]) -> None:
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


def test_a_file_of_0_1_is_read_and_one_of_something_else_is_not(tmp_path) -> None:
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
