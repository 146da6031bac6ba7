"""Which checkpoint is evaluated, on which text, beside what, and the file of an evaluation."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from invformer.assemble.model import untrained
from invformer.config.load import load_config
from invformer.config.schema import DataConfig
from invformer.data.corpora import read_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError, DataError
from invformer.evaluation.ngram import witten_bell_nats
from invformer.evaluation.result import Evaluation
from invformer.report.table import print_table
from invformer.runs.checkpoint import MANIFEST, MODEL, STATE_TENSORS, WEIGHTS, read_checkpoint
from invformer.runs.encoding import described
from invformer.runs.files import write_json
from invformer.trained.opening import restored, weights_on_meta
from tests.evaluation.test_evaluate import QUICK
from tests.runs.hostile import edit_json, flipped
from tests.support.processes import ROOT
from tests.support.saved_runs import (
    NO_STATE,
    TEXT_FILE,
    Saved,
    evaluated,
    save_run,
    write_checkpoint,
)

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run on a text that lies in its folder."""
    Saved(tmp_path).save()
    return tmp_path


def text_file(path: Path, max_characters: int | None = None) -> DataConfig:
    return DataConfig(name="text_file", path=str(path), max_characters=max_characters)


def evaluate(folder: Path, *more: str) -> Evaluation:
    return evaluated(folder, *QUICK, *more)


def test_a_checkpoint_cannot_make_us_read_devices_or_empty_files(folder) -> None:
    os.mkfifo(folder / "pipe")
    for path in ("/dev/zero", str(folder / "pipe")):
        (saved,) = (folder / "checkpoints").iterdir()
        edit_json(saved, MODEL, lambda m, path=path: m["config"]["data"].update(path=path))
        with pytest.raises(DataError, match=r"it was the checkpoint .* data\.path=PATH") as error:
            evaluate(folder)
        assert error.value.exit_code == 3
        text = f"data.path={folder / TEXT_FILE}"
        assert evaluate(folder, text).data.same_as_training
        report = evaluate(folder, text, "data.max_characters=1000")  # needs the rest for the n-gram
        assert report.ngram is None


def test_a_text_in_other_characters_is_refused_and_looked_for_where_it_is(folder) -> None:
    with pytest.raises(CheckpointError, match=r"most characters of python_docs \(pydoc_data"):
        evaluate(folder, "data.name=python_docs")
    other = folder / "other.txt"
    other.write_text("κείμενο " * 200)
    with pytest.raises(CheckpointError, match="most characters of text_file"):
        evaluate(folder, "data.name=text_file", f"data.path={other}")


def test_the_ngram_has_learnt_the_models_text_or_is_left_out(folder, capsys) -> None:
    other = folder / "other.txt"
    other.write_text("9 is 9 times 1; 16 is 2 times 8; 81 is 3 times 27; " * 20)
    elsewhere = "data.name=text_file", f"data.path={other}"
    learnt = read_corpus(text_file(folder / TEXT_FILE))
    expected = five_gram(learnt.split("train"), read_corpus(text_file(other)).split("val"))
    assert evaluate(folder, *elsewhere).ngram.nats == expected
    short = read_corpus(text_file(folder / TEXT_FILE, max_characters=1000)).split("val")
    assert learnt.split("val").startswith(short)
    report = evaluate(folder, "data.max_characters=1000")
    assert report.num_characters == len(short)
    assert report.ngram.nats == five_gram(learnt.split("train"), short)
    report = evaluate(folder, "data.split=train")
    assert report.ngram is None
    print_table(report)
    assert "-gram" not in capsys.readouterr().out
    (folder / TEXT_FILE).write_text("another text by now")
    assert evaluate(folder, *elsewhere).ngram is None


def five_gram(train: str, text: str) -> float:
    """Nats per character of a text to a 5-gram that has read another one."""
    vocabulary = Vocabulary.from_text(train)
    learnt, scored = vocabulary.encode(train), vocabulary.encode(text)
    return witten_bell_nats(learnt, scored, 5, vocab_size=vocabulary.size)


@pytest.mark.parametrize("preset", [path.stem for path in (ROOT / "configs/model").glob("*.yaml")])
def test_every_model_comes_back_from_its_checkpoint(preset: str, tmp_path) -> None:
    """Which also says that blocks are alike, and within the sizes that are held against files."""
    words = [f"model={preset}", "model.num_layers=3", "data.seq_len=9"]
    config = load_config([*words, "trainer.precision=64-true"])
    vocabulary = Vocabulary.from_text("abcdefgh")
    model = untrained(config, vocabulary.size)
    checkpoint = read_checkpoint(str(save_run(tmp_path, config, vocabulary, model)))
    weights = restored(checkpoint).state_dict()
    assert described(weights_on_meta(config, vocabulary.size)) == described(weights)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


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
