"""Characters or bytes to tokens and back, nothing lost and nothing silent."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import invformer
from invformer.data import vocabulary as module
from invformer.data.vocabulary import UNKNOWN, Vocabulary
from invformer.errors import CheckpointError, DataError
from tests.support.saved_runs import evaluated
from tests.support.small_runs import TEXT, built, fitted, options

TEXTS = st.text(st.characters(exclude_categories=()), min_size=1)


@given(TEXTS, st.text(st.characters(exclude_categories=())))
@example("ab", "aéb😀")
@example(f"a{UNKNOWN}", f"{UNKNOWN}ax")  # which has a token of its own if the text has it
def test_encoding_agrees_with_a_dictionary(train: str, other: str) -> None:
    vocabulary = Vocabulary.from_text(train)
    token_of = {c: i for i, c in enumerate(sorted(set(train)), start=1)}
    tokens = vocabulary.encode(other)
    assert tokens.tolist() == [token_of.get(c, 0) for c in other]
    assert vocabulary.decode(tokens) == "".join(c if c in token_of else UNKNOWN for c in other)


def test_bytes_become_text_again_however_they_are_cut() -> None:
    vocabulary = Vocabulary.of_bytes()
    symbols = vocabulary.symbols_of("∫ π")
    assert len(symbols) == 6
    assert "".join(vocabulary.text_of(symbols)) == "∫ π"
    assert "".join(vocabulary.text_of(["\ufffd", "a", symbols[0]])) == "\ufffda\ufffd"
    characters = Vocabulary.from_text("∫ π")
    assert characters.symbols_of("π") == "".join(characters.text_of("π")) == "π"


@pytest.mark.parametrize(
    ("count", "dtype"), [(255, torch.uint8), (256, torch.uint16), (65536, torch.uint32)]
)
def test_tokens_take_as_few_bytes_as_they_fit_in(count: int, dtype: torch.dtype) -> None:
    text = "".join(chr(i) for i in range(count))
    tokens = Vocabulary.from_text(text).encode(text)
    assert tokens.dtype == dtype
    assert tokens.tolist() == list(range(1, count + 1))


def test_a_long_text_is_encoded_piece_by_piece(monkeypatch) -> None:
    text = "the cat sat on the mat"
    vocabulary = Vocabulary.from_text(text)
    whole = vocabulary.encode(text)
    monkeypatch.setattr(module, "CHUNK", 5)
    assert torch.equal(vocabulary.encode(text), whole)
    assert Vocabulary.from_text([text[:3], "", text[3:]]) == vocabulary


def test_a_vocabulary_survives_json() -> None:
    vocabulary = Vocabulary.from_text('naïve "text"\r\n\ud800')
    assert Vocabulary.from_dict(json.loads(json.dumps(vocabulary.to_dict()))) == vocabulary


@pytest.mark.parametrize(
    "state", [None, [], {}, {"characters": 3}, {"characters": ""}, {"characters": "ba"},
              {"characters": "aab"}]
)  # fmt: skip
def test_a_damaged_vocabulary_is_refused(state: object) -> None:
    with pytest.raises(CheckpointError, match="vocabulary is damaged"):
        Vocabulary.from_dict(state)


GREEK = f"{TEXT}∫ π dx; {TEXT[:200]}"


def test_a_model_of_bytes_knows_every_text(folder) -> None:
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


def test_unknown_characters_are_refused_where_that_is_asked_for(folder) -> None:
    (folder / "squares.txt").write_text(TEXT + "Ω" * 60, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"squares.txt: the vocabulary of the model lacks 'Ω'; take"
    ):
        built(options(folder, "a", "data.unknown=refuse"))
    fitted(options(folder, "a", "trainer.max_steps=1"))
    with pytest.raises(DataError, match="lacks 'Ω'"):
        evaluated(folder / "a", "data.unknown=refuse")
