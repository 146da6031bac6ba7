"""A corpus as tokens, mapped from one file; what may be read of a path."""

import os
import threading
from pathlib import Path

import pytest
import torch

from invformer.config.schema import SavedPath
from invformer.data import files
from invformer.data import tokens as module
from invformer.data.files import files_below
from invformer.data.tokens import tokens_of
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError, StorageError
from tests.data.texts import corpus_at, whole, write

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
    cache, tmp_path, num_symbols: int, max_characters: int | None
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
    cache, tmp_path, monkeypatch
) -> None:
    corpus, again = (corpus_at(write(tmp_path / name, TEXT)) for name in ("a.txt", "b.txt"))
    vocabulary = Vocabulary.from_text(corpus.read("train"))
    whole = tokens_of(corpus, vocabulary)["all"].tolist()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tokens", pytest.fail)
        patch.setattr(module, "wait_for_lock", pytest.fail)  # the cache is only read
        assert tokens_of(again, vocabulary)["all"].tolist() == whole
    (file,) = cache.glob("*.tokens")
    os.truncate(file, 10)
    assert tokens_of(corpus, vocabulary)["all"].tolist() == whole
    tokens_of(corpus, Vocabulary.from_text("abc"))
    assert len(list(cache.glob("*.tokens"))) == 2


def test_a_text_that_changes_while_it_is_encoded_leaves_no_file(cache, tmp_path) -> None:
    corpus = corpus_at(write(tmp_path / "a.txt", TEXT))
    assert corpus.sha256
    write(tmp_path / "a.txt", TEXT.replace("9", "8"))
    with pytest.raises(DataError, match="changed while it was read"):
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    write(tmp_path / "a.txt", TEXT[:-1])
    with pytest.raises(DataError, match="became shorter while it was read"):
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_a_cache_that_takes_no_file_is_one_line(cache, tmp_path) -> None:
    corpus = corpus_at(write(tmp_path / "a.txt", TEXT))
    write(tmp_path / "cache", "no folder")
    with pytest.raises(StorageError, match=r"cache.*cannot be written .*set XDG_CACHE") as error:
        tokens_of(corpus, Vocabulary.from_text(TEXT))
    assert "\n" not in str(error.value)


UNTYPED = "it was the checkpoint that named it; name the text yourself with data.path=PATH"


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        corpus_at(path)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_device_is_nobodys_text_and_what_a_checkpoint_names_may_be_gone(tmp_path) -> None:
    (tmp_path / "text.txt").symlink_to("/dev/zero")
    for path in ("/dev/zero", "/dev/null", tmp_path / "text.txt", tmp_path):
        assert "not a regular file; give data.path a plain file, a folder or a" in refusal(path)
    assert refusal(SavedPath("/dev/zero")) == f"/dev/zero: not a regular file, and {UNTYPED}"
    assert refusal(SavedPath("/no/text")) == f"/no/text: no such file or folder, and {UNTYPED}"


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self/maps"])
def test_files_of_the_kernel_are_no_text_that_a_checkpoint_may_name(path: str) -> None:
    if not Path(path).exists():
        pytest.skip("this system has no such files")
    assert "has no train text" in refusal(SavedPath(path))


def test_a_file_of_holes_is_refused_at_its_first_megabyte(tmp_path) -> None:
    write(tmp_path / "text.txt", "")
    os.truncate(tmp_path / "text.txt", 1 << 40)
    assert "a megabyte of zero bytes is no text" in refusal(tmp_path / "text.txt")


def test_a_pipe_is_read_where_it_was_typed_and_not_waited_for_elsewhere(tmp_path) -> None:
    path = tmp_path / "text.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=["from a pipe"])
    writer.start()
    assert whole(corpus_at(path)) == "from a pipe"
    writer.join()
    for other in (tmp_path, SavedPath(path), SavedPath(tmp_path)):
        assert "not a regular file" in refusal(other)


def test_the_texts_that_a_checkpoint_names_are_bounded_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 25)
    (tmp_path / "link").symlink_to(write(tmp_path / "a.txt"))
    assert whole(corpus_at(SavedPath(tmp_path / "link"))) == "some text "
    write(tmp_path / "b.txt")
    corpus_at(SavedPath(tmp_path))
    write(tmp_path / "c.txt")
    assert refusal(SavedPath(tmp_path)) == (
        f"{tmp_path / 'c.txt'}: more than 25 bytes of text, and {UNTYPED}"
    )
    corpus_at(tmp_path)


def test_a_folder_gives_its_texts_in_any_case_and_nothing_hidden(tmp_path) -> None:
    wanted = ["B.TXT", "a/b.txt", "a/b/c.Txt", "a.txt", "d.txt/e.txt", "z.txt"]
    hidden = [".git/a.txt", ".hidden.txt", "a/._b.txt", ".txt", "d.txt/.cache/f.txt"]
    for name in [*wanted, *hidden, "notes.md", "a/x.txt.gz"]:
        write(tmp_path / name)
    found = [f.relative_to(tmp_path).as_posix() for f in files_below(tmp_path, ".txt")]
    assert found == ["B.TXT", "a/b/c.Txt", "a/b.txt", "a.txt", "d.txt/e.txt", "z.txt"]
    write(tmp_path / ".texts" / "a.txt")
    assert len(files_below(tmp_path / ".texts", ".txt")) == 1
