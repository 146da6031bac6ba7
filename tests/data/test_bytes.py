"""Text as bytes, and characters that a vocabulary lacks."""

from pathlib import Path

import pytest

import invformer
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError
from tests.support.saved_runs import evaluated
from tests.support.small_runs import TEXT, built, fitted, options

GREEK = f"{TEXT}∫ π dx; {TEXT[:200]}"


def test_a_model_of_bytes_knows_every_text(folder: Path) -> None:
    (folder / "squares.txt").write_text(GREEK, encoding="utf-8")
    words = ("data.vocabulary=bytes", "data.unknown=refuse", "trainer.max_steps=2")
    fitted(options(folder, "a", *words, "trainer.sample_length=5"))
    model = invformer.load(folder / "a", "cpu")
    assert model.vocabulary.size == 257
    assert model.generate("Ж π", 5).startswith("Ж π")
    found = model.invert(model.encode("Ж π"))
    assert (found.text, len(found.symbols), len(found.proven)) == ("Ж π", 5, 5)
    assert all(found.proven)
    (folder / "other.txt").write_text("Жж" * 40, encoding="utf-8")
    other = ["data=text_file", f"data.path={folder / 'other.txt'}", "data.split=all"]
    report = evaluated(folder / "a", *other)
    assert report.num_characters == 160
    assert report.data.unknown_rate == 0


def test_a_replacement_character_is_one_that_a_vocabulary_may_lack() -> None:
    with pytest.raises(DataError, match="lacks '\ufffd'"):
        Vocabulary.from_text("ab").require(["ab\ufffd"], "text")
    Vocabulary.from_text("a\ufffd").require(["\ufffd"], "text")


def test_unknown_characters_are_refused_where_that_is_asked_for(folder: Path) -> None:
    (folder / "squares.txt").write_text(TEXT + "Ω" * 60, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"squares.txt: the vocabulary of the model lacks 'Ω'; take"
    ):
        built(options(folder, "a", "data.unknown=refuse"))
    fitted(options(folder, "a", "trainer.max_steps=1"))
    with pytest.raises(DataError, match="lacks 'Ω'"):
        evaluated(folder / "a", "data.unknown=refuse")
