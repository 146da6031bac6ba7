"""Characters to tokens and back, nothing lost and nothing silent."""

import dataclasses
import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from invformer.data import vocabulary as module
from invformer.data.vocabulary import UNKNOWN, Vocabulary
from invformer.errors import CheckpointError

TEXTS = st.text(st.characters(exclude_categories=()), min_size=1)


@given(TEXTS)
def test_decoding_an_encoded_text_gives_it_back(text: str) -> None:
    vocabulary = Vocabulary.from_text(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


@given(TEXTS, st.text(st.characters(exclude_categories=())))
@example("ab", "aéb😀")
@example(f"a{UNKNOWN}", f"{UNKNOWN}ax")  # which has a token of its own if the text has it
def test_encoding_agrees_with_a_dictionary_and_unknown_characters_show(
    train: str, other: str
) -> None:
    vocabulary = Vocabulary.from_text(train)
    token_of = {c: i for i, c in enumerate(sorted(set(train)), start=1)}
    tokens = vocabulary.encode(other)
    assert tokens.tolist() == [token_of.get(c, 0) for c in other]
    assert vocabulary.decode(tokens) == "".join(c if c in token_of else UNKNOWN for c in other)


def test_every_byte_is_a_character() -> None:
    content = bytes(range(256))
    vocabulary = Vocabulary.of_bytes()
    assert Vocabulary.from_text(content.decode("latin-1")) == vocabulary
    decoded = vocabulary.decode(vocabulary.encode(content.decode("latin-1")))
    assert decoded.encode("latin-1") == content
    assert vocabulary.size == 257


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


def test_a_long_text_is_encoded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat sat on the mat"
    vocabulary = Vocabulary.from_text(text)
    whole = vocabulary.encode(text)
    monkeypatch.setattr(module, "CHUNK", 5)
    assert torch.equal(vocabulary.encode(text), whole)
    assert Vocabulary.from_text([text[:3], "", text[3:]]) == vocabulary


def test_a_vocabulary_survives_json_and_cannot_be_changed() -> None:
    vocabulary = Vocabulary.from_text('naïve "text"\r\n\ud800')
    assert Vocabulary.from_dict(json.loads(json.dumps(vocabulary.to_dict()))) == vocabulary
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocabulary.symbols = ("a",)  # type: ignore[misc]


@pytest.mark.parametrize(
    "state", [None, [], {}, {"characters": 3}, {"characters": ""}, {"characters": "ba"},
              {"characters": "aab"}]
)  # fmt: skip
def test_a_damaged_vocabulary_is_refused(state: object) -> None:
    with pytest.raises(CheckpointError, match="vocabulary is damaged"):
        Vocabulary.from_dict(state)
