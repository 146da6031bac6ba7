"""Every source gives exactly its text, in splits that share nothing; bad input gives one line."""

import hashlib
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from invformer.data import corpora, hub
from invformer.data.corpora import load_corpus
from invformer.data.corpus import SPLITS, Corpus
from invformer.data.files import SavedPath
from invformer.errors import DataError
from tests.fake_wandb import FakeServer

TEXT = "".join(f"line {i}: naïve “text”\r\n" for i in range(100)) + "\n\nno newline at the end"


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def whole(corpus: Corpus) -> str:
    return "".join(corpus.read(*SPLITS))


def paragraphs(text: str) -> set[str]:
    return {" ".join(p.split()) for p in text.split("\n\n")}


# --- Python's own text ---------------------------------------------------------------------------


def test_python_docs_has_the_shares_asked_for_and_says_which_python() -> None:
    corpus = load_corpus("python_docs")
    total = sum(corpus.sizes.values())
    assert total > 300_000
    assert corpus.sizes["val"] == pytest.approx(0.05 * total, rel=0.1)
    assert corpus.sizes["test"] == pytest.approx(0.05 * total, rel=0.1)
    assert platform.python_version() in corpus.source
    assert load_corpus("python_docs") == corpus


def test_python_docs_shares_no_text_between_splits() -> None:
    corpus = load_corpus("python_docs", val_fraction=0.2, test_fraction=0.2)
    for split in ("val", "test"):
        for other in set(SPLITS) - {split}:
            shared = paragraphs(corpus.split(split)) & paragraphs(corpus.split(other))
            assert sum(map(len, shared)) < 0.01 * len(corpus.split(split))


def test_python_stdlib_leaves_out_tests_and_what_differs_between_machines(tmp_path: Path) -> None:
    for name in ("os.py", "json/__init__.py", "json/tool.py", "test/a.py", "json/tests/b.py",
                 "site-packages/c.py", "idlelib/idle_test/d.py", "_sysconfigdata_x.py",
                 "config-3.11/e.py", "sitecustomize.py", "notes.txt"):  # fmt: skip
        write(tmp_path / name, "x = 1\n")
    names = [f.relative_to(tmp_path).as_posix() for f in corpora.python_sources(tmp_path)]
    assert names == ["json/__init__.py", "json/tool.py", "os.py"]


def test_python_stdlib_is_large_and_deterministic() -> None:
    corpus = load_corpus("python_stdlib")
    total = sum(corpus.sizes.values())
    assert total > 5_000_000
    assert corpus.sizes["val"] == pytest.approx(0.05 * total, rel=0.1)
    assert load_corpus("python_stdlib").sha256 == corpus.sha256


def test_a_source_file_is_read_in_the_encoding_it_declares(tmp_path: Path) -> None:
    content = "# -*- coding: latin-1 -*-\r\ns = 'é'\r\n"
    assert corpora.decode_source(write(tmp_path / "a.py", content.encode("latin-1"))) == content
    with pytest.raises(DataError, match=r"b\.py: .*encoding"):
        corpora.decode_source(write(tmp_path / "b.py", b"# coding: nonsense\n"))


def test_documents_are_dealt_out_whole_and_the_same_whatever_their_order() -> None:
    documents = {f"topic {i}": str(i % 10) * (i + 1) for i in range(60)}
    dealt = corpora.deal(documents, 0.1, 0.1)
    assert dealt == corpora.deal(dict(reversed(documents.items())), 0.1, 0.1)
    assert sorted("".join(dealt.values())) == sorted("".join(documents.values()))
    for split in ("val", "test"):
        assert 0 < len(dealt[split]) <= 0.1 * sum(map(len, documents.values()))
    runs = corpora.deal({name: f"<{name}>" for name in documents}, 0.3, 0.3)
    assert all(sum(f"<{name}>" in text for text in runs.values()) == 1 for name in documents)


# --- Local files ---------------------------------------------------------------------------------


def test_a_file_is_cut_into_contiguous_splits_and_nothing_is_changed(tmp_path: Path) -> None:
    text = "\ufeff" + TEXT
    corpus = load_corpus("text_file", write(tmp_path / "a.txt", text), 0.1, 0.2)
    assert whole(corpus) == text
    assert corpus.sizes["train"] == pytest.approx(0.7 * len(text), abs=1)
    assert corpus.sizes["test"] == pytest.approx(0.2 * len(text), abs=1)
    assert corpus.unit == "characters"
    assert str(tmp_path) in corpus.source


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path: Path) -> None:
    for name, text in [
        ("b.txt", "two\r\n"),
        ("a.txt", "one "),
        ("c/d.txt", "three"),
        ("x.md", "!"),
    ]:
        write(tmp_path / name, text)
    assert whole(load_corpus("text_file", tmp_path)) == "one two\r\nthree"


def test_a_pattern_is_the_files_it_matches_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.md", "c/d.md", "x.txt"):
        write(tmp_path / name, f"{name} ")
    assert whole(load_corpus("text_file", tmp_path / "*.md")) == "a.md b.md "
    assert whole(load_corpus("text_file", tmp_path / "**" / "*.md")) == "a.md b.md c/d.md "
    write(tmp_path / "[1].md", "a name, not a pattern")
    assert whole(load_corpus("text_file", tmp_path / "[1].md")) == "a name, not a pattern"
    for path in (tmp_path / "*.rst", SavedPath(tmp_path / "*.md")):
        with pytest.raises(DataError, match="no such file or folder"):
            load_corpus("text_file", path)


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("train.txt", "valid.txt", "test.txt"), ("train.txt", "val.txt", "test.txt"),
     ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")],
)  # fmt: skip
def test_a_folder_with_splits_keeps_them(tmp_path: Path, train: str, val: str, test: str) -> None:
    for name in (train, val, test):
        write(tmp_path / name, f"text of {name}\r\n")
    corpus = load_corpus("wikitext2", tmp_path)
    texts = [corpus.split(s) for s in SPLITS]
    assert texts == [f"text of {name}\r\n" for name in (train, val, test)]


def test_a_missing_test_file_is_an_error_only_when_the_test_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", "some text to train on")
    write(tmp_path / "valid.txt", "some more")
    corpus = load_corpus("tiny_shakespeare", tmp_path)
    assert corpus.sizes["test"] == 0
    with pytest.raises(DataError, match=r"no test text, only 21 \(train\), 9 \(val\), 0 \(test\)"):
        corpus.split("test")


def test_a_missing_validation_file_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", "some text")
    with pytest.raises(DataError, match=r"train\.txt but no file for validation"):
        load_corpus("text_file", tmp_path)


def test_penn_treebank_words_become_characters_in_the_standard_way(tmp_path: Path) -> None:
    write(tmp_path / "ptb.train.txt", " the <unk> of N \n no it was n't \n")
    write(tmp_path / "ptb.valid.txt", " yes \n")
    write(tmp_path / "ptb.char.train.txt", "y e s")
    corpus = load_corpus("ptb", tmp_path)
    assert corpus.split("train") == "the_<unk>_of_N\nno_it_was_n't\n"
    assert corpus.split("val") == "yes\n"
    assert corpus.sizes["test"] == 0


def test_enwik8_is_read_as_bytes_from_an_archive_or_a_folder(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", content)
    for path in (tmp_path / "enwik8.zip", tmp_path):
        corpus = load_corpus("enwik8", path)
        assert whole(corpus).encode("latin-1") == content
        assert corpus.unit == "bytes"


@pytest.mark.parametrize("name", ["text8", "enwik8"])
def test_the_hundred_million_benchmarks_have_their_customary_splits(name: str) -> None:
    sizes = corpora.cut(name, 100_000_000, 0.2, 0.01)
    assert [sizes[s] for s in SPLITS] == [90_000_000, 5_000_000, 5_000_000]


def test_a_shortened_corpus_keeps_the_beginning_of_every_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    full, short = load_corpus("text_file", path), load_corpus("text_file", path, max_characters=200)
    for split in SPLITS:
        assert full.split(split).startswith(short.split(split))
    assert 197 <= len(whole(short)) <= 200
    assert len(short.split("val")) == 200 * len(full.split("val")) // len(TEXT)
    assert load_corpus("text_file", path, max_characters=10**9) == full


def test_the_digest_covers_the_text_and_where_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    corpus = load_corpus("text_file", path)
    assert load_corpus("text_file", path).sha256 == corpus.sha256
    assert load_corpus("text_file", path, val_fraction=0.06).sha256 != corpus.sha256
    parts = (f"{s} {len(corpus.split(s))}\n{corpus.split(s)}" for s in SPLITS)
    assert hashlib.sha256("".join(parts).encode()).hexdigest() == corpus.sha256
    write(path, TEXT.replace("9", "8"))
    assert load_corpus("text_file", path).sha256 != corpus.sha256


def test_a_corpus_does_not_print_its_text(tmp_path: Path) -> None:
    assert len(repr(load_corpus("text_file", write(tmp_path / "a.txt", TEXT)))) < 500


def test_text_that_is_not_utf8_names_the_file_and_the_place(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "fine")
    write(tmp_path / "b.txt", b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"b\.txt: byte 0xe9 at offset 3 is not UTF-8"):
        load_corpus("text_file", tmp_path)


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a", 1)])
def test_a_text_without_two_characters_is_refused(tmp_path: Path, text: str, count: int) -> None:
    with pytest.raises(DataError, match=f"{count} characters of text, nothing to learn from"):
        load_corpus("text_file", write(tmp_path / "a.txt", text))


def test_a_corpus_shortened_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train text, only .* data\.max_characters"):
        load_corpus("text_file", write(tmp_path / "a.txt", TEXT), max_characters=1)


@pytest.mark.parametrize(
    ("name", "path", "match"),
    [
        ("text_file", "missing.txt", r"missing\.txt: no such file or folder; check data\.path"),
        ("ptb", "missing", "no such file or folder"),
        ("text_file", "empty", r"no \*\.txt in this folder"),
        ("text_file", "bad.zip", "not a readable archive"),
        ("text_file", "two.zip", "2 files in the archive instead of one"),
        ("text_file", "folder.txt", r"no \*\.txt in this folder"),
        ("text_file", None, "needs data.path=FILE"),
        ("python_docs", "a.txt", "takes no data.path; use data.name=text_file"),
        ("shakespear", None, "no corpus 'shakespear': pick one of python_docs"),
    ],
)
def test_a_path_that_holds_no_corpus_is_refused_in_one_line(
    tmp_path: Path, name: str, path: str | None, match: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.txt" / "inner.txt").mkdir(parents=True)
    write(tmp_path / "bad.zip", "no archive")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "a")
        archive.writestr("b", "b")
    with pytest.raises(DataError, match=match) as caught:
        load_corpus(name, None if path is None else tmp_path / path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


# --- The Hugging Face Hub ------------------------------------------------------------------------


def hub_answers(monkeypatch: pytest.MonkeyPatch, column: str, splits: dict[str, list[str]]) -> list:
    """Put tables in the place of the Hub; returns the calls that ask for them."""
    import datasets

    calls: list = []

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.DatasetDict:
        calls.append((args, kwargs))
        return datasets.DatasetDict(
            {name: datasets.Dataset.from_dict({column: rows}) for name, rows in splits.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "reach", lambda repository: None)
    return calls


def test_tiny_shakespeare_comes_from_the_hub_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": ["First\r\n"], "validation": ["Second"], "test": ["Third"]}
    calls = hub_answers(monkeypatch, "text", splits)
    corpus = load_corpus("tiny_shakespeare")
    assert [corpus.split(s) for s in SPLITS] == ["First\r\n", "Second", "Third"]
    assert calls == [(("karpathy/tiny_shakespeare", None), {})]
    assert corpus.source == "Hugging Face Hub, karpathy/tiny_shakespeare"


def test_penn_treebank_is_the_same_from_the_hub_and_from_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sentences = {"train": ["the <unk> of N", "no"], "validation": ["yes"], "test": ["so it is"]}
    calls = hub_answers(monkeypatch, "sentence", sentences)
    corpus = load_corpus("ptb")
    for split, lines in sentences.items():
        write(tmp_path / f"{split}.txt", "".join(f" {line} \n" for line in lines))
    assert load_corpus("ptb", tmp_path).sha256 == corpus.sha256
    ((arguments, options),) = calls
    assert arguments == ("parquet",)
    assert all("refs%2Fconvert%2Fparquet" in f for f in options["data_files"].values())


def test_wikitext_gets_its_blank_lines_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["", " = Title = \n", "", " A sentence . \n"]
    hub_answers(monkeypatch, "text", {s: rows for s in ("train", "validation", "test")})
    assert load_corpus("wikitext2").split("val") == " \n = Title = \n \n A sentence . \n"


@pytest.mark.parametrize("name", ["text8", "enwik8"])
def test_a_copy_on_the_hub_that_is_not_the_benchmark_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hub_answers(monkeypatch, "text", {s: ["é"] for s in ("train", "validation", "test")})
    with pytest.raises(DataError, match="instead of 100000000"):
        load_corpus(name)


def test_an_unreachable_hub_is_one_line_that_says_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"text8: cannot be loaded .*set data\.path") as caught:
        load_corpus("text8")
    assert "\n" not in str(caught.value)


def test_a_hub_that_accepts_and_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    server = FakeServer("hangs")
    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    try:
        with pytest.raises(DataError, match=r"text8: cannot be loaded .*set data\.path"):
            load_corpus("text8")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("offline", "error"), [("0", "Connect"), ("1", "NoneType")], ids=["online", "offline"]
)
def test_the_hub_is_asked_in_a_process_that_has_not_loaded_datasets(
    offline: str, error: str
) -> None:
    # What datasets loads hides which modules of huggingface_hub are loaded only when named.
    program = (
        "import sys; from invformer.data import hub; error = None\n"
        "try: hub.reach('karpathy/tiny_shakespeare')\n"
        "except Exception as caught: error = caught\n"
        "assert 'datasets' not in sys.modules; print(type(error).__name__)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(error), done.stdout


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which ``datasets`` keeps the training split of a corpus from the Hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = {}
    for split in ("train", "validation", "test"):
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_dict({"text": [f"text of {split} " * 50]}).to_parquet(files[split])
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: load("parquet", data_files=files))
    monkeypatch.setattr(hub, "reach", lambda repository: None)
    load_corpus("tiny_shakespeare")
    (found,) = (tmp_path / "cache").rglob("parquet-train.arrow")
    return found


def test_a_byte_that_changed_in_the_cache_is_noticed(kept: Path) -> None:
    assert load_corpus("tiny_shakespeare").split("train").startswith("text of train")
    content = kept.read_bytes()
    kept.write_bytes(content.replace(b"text of train", b"text 0f train", 1))
    with pytest.raises(DataError, match="is not what it was when it was first read"):
        load_corpus("tiny_shakespeare")
    kept.write_bytes(content)
    assert load_corpus("tiny_shakespeare").split("train").startswith("text of train")


def test_a_cache_that_was_cut_short_is_one_line(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:900])
    with pytest.raises(DataError, match=r"cannot be loaded .*delete what was") as caught:
        load_corpus("tiny_shakespeare")
    assert "\n" not in str(caught.value)


def test_a_table_that_was_downloaded_by_hand_is_a_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split in ("train", "validation", "test"):
        table = datasets.Dataset.from_dict({"text": [f"text of {split}\r\n"]})
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    corpus = load_corpus("tiny_shakespeare", tmp_path)
    assert corpus.split("val") == "text of validation\r\n"
    write(tmp_path / "train-00000-of-00001.parquet", "no table")
    with pytest.raises(DataError, match=r"train-.*\.parquet: not a table of text"):
        load_corpus("tiny_shakespeare", tmp_path)
