"""A corpus of any size as tokens: mapped from one file that is complete or not there."""

import os
from pathlib import Path

import pytest
import torch

from invformer.data import tokens as module
from invformer.data.tokens import tokens_of
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError, StorageError
from tests.data.texts import corpus_at, write

TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(300))


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """The folder of the cache, which takes also small corpora."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MAPPED_BYTES", 0)
    return tmp_path / "cache/invformer/tokens"


@pytest.mark.parametrize("num_symbols", [26, 300])
@pytest.mark.parametrize("max_characters", [None, 1000])
def test_mapped_tokens_are_those_of_the_text(
    cache: Path, tmp_path, num_symbols: int, max_characters: int | None
) -> None:
    text = "".join(chr(100 + i) for i in range(num_symbols)) * 90
    path = write(tmp_path / "a.txt", text)
    corpus = corpus_at(path, max_characters=max_characters)
    vocabulary = Vocabulary.from_text(corpus.read("train"))
    tokens = tokens_of(corpus, vocabulary, max_val_characters=17)
    for split in ("train", "test"):
        assert torch.equal(tokens[split], vocabulary.encode(corpus.split(split)))
    assert tokens["val"].tolist() == vocabulary.encode(corpus.split("val"))[:17].tolist()
    assert len(tokens["all"]) == corpus.total
    assert len(list(cache.glob("*.tokens"))) == 1


def test_one_text_is_encoded_once_whatever_its_name_and_again_if_it_was_cut_short(
    cache: Path, tmp_path, monkeypatch
) -> None:
    for name in ("a.txt", "b.txt"):
        corpus = corpus_at(write(tmp_path / name, TEXT))
        vocabulary = Vocabulary.from_text(corpus.read("train"))
        whole = tokens_of(corpus, vocabulary)["all"].tolist()
        monkeypatch.setattr(module, "write_tokens", pytest.fail)
        monkeypatch.setattr(module, "wait_for_lock", pytest.fail)  # the cache is only read
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MAPPED_BYTES", 0)
    (file,) = cache.glob("*.tokens")
    os.truncate(file, 10)
    assert tokens_of(corpus, vocabulary)["all"].tolist() == whole
    tokens_of(corpus, Vocabulary.from_text("abc"))
    assert len(list(cache.glob("*.tokens"))) == 2


def test_a_text_that_changes_while_it_is_encoded_leaves_no_file(cache: Path, tmp_path) -> None:
    corpus = corpus_at(write(tmp_path / "a.txt", TEXT))
    assert corpus.sha256
    write(tmp_path / "a.txt", TEXT.replace("9", "8"))
    with pytest.raises(DataError, match="changed while it was read"):
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    write(tmp_path / "a.txt", TEXT[:-1])
    with pytest.raises(DataError, match="became shorter while it was read"):
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_a_cache_that_takes_no_file_is_one_line(cache: Path, tmp_path) -> None:
    corpus = corpus_at(write(tmp_path / "a.txt", TEXT))
    write(tmp_path / "cache", "no folder")
    with pytest.raises(StorageError, match=r"cache.*cannot be written .*set XDG_CACHE") as error:
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    assert "\n" not in str(error.value)
