"""Characters or bytes to tokens and back, mapped from one file; what may be read of a path."""

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import invformer
from invformer.config.schema import SavedPath
from invformer.data import files
from invformer.data import tokens as module
from invformer.data import vocabulary as vocabularies
from invformer.data.files import files_below
from invformer.data.tokens import tokens_of
from invformer.data.vocabulary import UNKNOWN, Vocabulary
from invformer.errors import CheckpointError, DataError, StorageError
from tests.data.texts import corpus_at, whole, write
from tests.support.saved_runs import evaluated
from tests.support.small_runs import TEXT as SQUARES
from tests.support.small_runs import built, fitted, options

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
    monkeypatch.setattr(vocabularies, "CHUNK", 5)
    assert torch.equal(vocabulary.encode(text), whole)
    assert Vocabulary.from_text([text[:3], "", text[3:]]) == vocabulary


@pytest.mark.parametrize(
    "state", [None, [], {}, {"characters": 3}, {"characters": ""}, {"characters": "ba"},
              {"characters": "aab"}]
)  # fmt: skip
def test_a_damaged_vocabulary_is_refused(state: object) -> None:
    with pytest.raises(CheckpointError, match="vocabulary is damaged"):
        Vocabulary.from_dict(state)


GREEK = f"{SQUARES}∫ π dx; {SQUARES[:200]}"


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
    (folder / "squares.txt").write_text(SQUARES + "Ω" * 60, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"squares.txt: the vocabulary of the model lacks 'Ω'; take"
    ):
        built(options(folder, "a", "data.unknown=refuse"))
    fitted(options(folder, "a", "trainer.max_steps=1"))
    with pytest.raises(DataError, match="lacks 'Ω'"):
        evaluated(folder / "a", "data.unknown=refuse")
