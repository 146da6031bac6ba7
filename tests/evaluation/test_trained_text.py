"""Which text a checkpoint is evaluated on, and what it is compared with there."""

import os
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
from invformer.runs.checkpoint import MODEL, read_checkpoint
from invformer.runs.encoding import described
from invformer.trained.opening import restored, weights_on_meta
from tests.evaluation.test_evaluate import QUICK
from tests.runs.hostile import edit_json
from tests.support.processes import ROOT
from tests.support.saved_runs import TEXT_FILE, Saved, evaluated, save_run

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
