"""Every source gives exactly its text, in splits that share nothing; bad input gives one line."""

import gzip
import hashlib
import platform
from contextlib import closing
from typing import Any

import pytest

from invformer.config.schema import CorpusName, DataConfig, SavedPath
from invformer.data import corpora, hub
from invformer.data.corpora import read_corpus
from invformer.data.corpus import SPLITS, Corpus
from invformer.data.files import files_below
from invformer.errors import DataError
from tests.data.texts import corpus_at, whole, write
from tests.support import fake_hub
from tests.support.fake_wandb import FakeServer
from tests.support.processes import python

TEXT = "".join(f"line {i}: naïve “text”\r\n" for i in range(100)) + "\n\nno newline at the end"


def texts(corpus: Corpus) -> list[str]:
    return [corpus.split(split) for split in SPLITS]


@pytest.mark.parametrize(("name", "least"), [("python_docs", 3e5), ("python_stdlib", 5e6)])
def test_pythons_own_text_is_the_same_and_cut_as_asked(name: CorpusName, least: float) -> None:
    corpus = read_corpus(DataConfig(name=name))
    assert corpus.total > least
    assert corpus.sizes["val"] == pytest.approx(0.05 * corpus.total, rel=0.1)
    assert corpus.sizes["test"] == pytest.approx(0.05 * corpus.total, rel=0.1)
    assert platform.python_version() in corpus.source
    assert read_corpus(DataConfig(name=name)).sha256 == corpus.sha256


def test_python_docs_shares_no_text_between_splits() -> None:
    corpus = read_corpus(DataConfig(val_fraction=0.2, test_fraction=0.2))
    of = {s: {" ".join(p.split()) for p in corpus.split(s).split("\n\n")} for s in SPLITS}
    for split, other in (("val", "train"), ("val", "test"), ("test", "train")):
        assert sum(map(len, of[split] & of[other])) < 0.01 * corpus.size(split)


def test_python_stdlib_leaves_out_tests_and_what_differs_between_machines(tmp_path) -> None:
    for name in ("os.py", "json/__init__.py", "json/tool.py", "test/a.py", "json/tests/b.py",
                 "site-packages/c.py", "idlelib/idle_test/d.py", "_sysconfigdata_x.py",
                 "config-3.11/e.py", "sitecustomize.py", "notes.txt"):  # fmt: skip
        write(tmp_path / name, "x = 1\n")
    found = files_below(tmp_path, ".py", corpora.FOREIGN)
    names = [f.relative_to(tmp_path).as_posix() for f in found]
    assert names == ["json/__init__.py", "json/tool.py", "os.py"]


def test_a_source_file_is_read_in_the_encoding_it_declares(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda _: str(tmp_path))
    content = "# -*- coding: latin-1 -*-\ns = 'é'\n"
    for name in "abc":  # a package for each split
        write(tmp_path / f"{name}.py", content.encode("latin-1"))
    assert "é" in whole(read_corpus(DataConfig(name="python_stdlib")))
    write(tmp_path / "d.py", b"# coding: nonsense\n")
    with pytest.raises(DataError, match=r"d\.py: .*encoding"):
        read_corpus(DataConfig(name="python_stdlib"))


def test_a_file_is_cut_into_contiguous_splits_and_nothing_is_changed(tmp_path) -> None:
    text = TEXT + "\ufeff\r\n"
    corpus = corpus_at(write(tmp_path / "a.txt", text), val_fraction=0.1, test_fraction=0.2)
    assert whole(corpus) == text
    assert corpus.sizes["train"] == pytest.approx(0.7 * len(text), abs=1)
    assert corpus.sizes["test"] == pytest.approx(0.2 * len(text), abs=1)
    assert (corpus.unit, corpus.source) == ("characters", str(tmp_path / "a.txt"))
    assert len(repr(corpus)) < 500


def test_a_folder_or_a_pattern_is_its_files_in_sorted_order(tmp_path) -> None:
    for name in ("b.txt", "a.txt", "c/d.txt", "c/e.md", "[1].md"):
        write(tmp_path / name, f"\ufeff{name}\r\n")  # a byte order mark is no text
    assert whole(corpus_at(tmp_path)) == "a.txt\r\nb.txt\r\nc/d.txt\r\n"
    assert whole(corpus_at(tmp_path / "?.txt")) == "a.txt\r\nb.txt\r\n"
    assert whole(corpus_at(tmp_path / "**" / "*.md")) == "[1].md\r\nc/e.md\r\n"
    assert whole(corpus_at(tmp_path / "[1].md")) == "[1].md\r\n"  # a name, not a pattern
    assert whole(corpus_at(SavedPath(tmp_path / "c" / "*.md"))) == "c/e.md\r\n"
    for path in (tmp_path / "*.rst", SavedPath(tmp_path / "**" / "*.md")):
        with pytest.raises(DataError, match="no such file or folder"):
            corpus_at(path)


@pytest.mark.parametrize(
    "names",
    [("train.txt", "valid.txt", "test.txt"), ("train.txt", "val.txt", "test.txt"),
     ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")],
)  # fmt: skip
def test_a_folder_with_splits_keeps_them(tmp_path, names: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path / name, f"text of {name}\r\n")
    assert texts(corpus_at(tmp_path, "wikitext2")) == [f"text of {name}\r\n" for name in names]


def test_a_missing_file_is_an_error_where_its_split_is_asked_for(tmp_path) -> None:
    write(tmp_path / "train.txt", "some text to train on")
    with pytest.raises(DataError, match=r"train\.txt but no file for validation"):
        corpus_at(tmp_path)
    write(tmp_path / "valid.txt", "some more")
    corpus = corpus_at(tmp_path)
    with pytest.raises(DataError, match=r"no test text, only 21 \(train\), 9 \(val\), 0 \(test\)"):
        corpus.split("test")


def test_penn_treebank_words_become_characters_in_the_standard_way(tmp_path) -> None:
    write(tmp_path / "ptb.train.txt", " the <unk> of N \n no it\u2028was\x85n't\x0c \r \n")
    write(tmp_path / "ptb.valid.txt", " yes \n")
    write(tmp_path / "ptb.char.train.txt", "y e s")
    corpus = corpus_at(tmp_path, "ptb")
    assert corpus.split("train") == "the_<unk>_of_N\nno_it\u2028was\x85n't\x0c_\r\n"
    assert corpus.split("val") == "yes\n"


def test_enwik8_is_read_as_bytes_from_a_file_or_its_folder(tmp_path) -> None:
    content = bytes(range(256)) * 10
    for path in (write(tmp_path / "enwik8", content), tmp_path):
        corpus = corpus_at(path, "enwik8")
        assert whole(corpus).encode("latin-1") == content
        assert corpus.unit == "bytes"


def test_the_hundred_million_benchmarks_have_their_customary_splits() -> None:
    for name in ("text8", "enwik8"):
        sizes = corpora.cut(DataConfig(name=name, val_fraction=0.2), 100_000_000)
        assert [sizes[s] for s in SPLITS] == [90_000_000, 5_000_000, 5_000_000]


def test_a_shortened_corpus_keeps_the_beginning_of_every_split(tmp_path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    full, short = corpus_at(path), corpus_at(path, max_characters=200)
    for text, beginning in zip(texts(full), texts(short), strict=True):
        assert text.startswith(beginning)
        assert len(beginning) == 200 * len(text) // len(TEXT)
    assert corpus_at(path, max_characters=10**9).sha256 == full.sha256


def test_a_corpus_of_bytes_is_the_text_in_utf_8(tmp_path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    corpus, plain = corpus_at(path, vocabulary="bytes"), corpus_at(path)
    assert [text.encode("latin-1") for text in texts(corpus)] == [t.encode() for t in texts(plain)]
    assert corpus.unit == "bytes"
    assert corpus.sha256 != plain.sha256


def test_the_digest_covers_the_text_and_where_it_is_cut(tmp_path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    corpus = corpus_at(path)
    parts = (f"{s} {len(corpus.split(s))}\n{corpus.split(s)}" for s in SPLITS)
    assert hashlib.sha256("".join(parts).encode()).hexdigest() == corpus.sha256
    assert corpus_at(path, val_fraction=0.06).sha256 != corpus.sha256


@pytest.mark.parametrize(
    ("name", "path", "match"),
    [
        ("text_file", "missing.txt", r"missing\.txt: no such file or folder; check data\.path"),
        ("text_file", "folder.txt", r"no \*\.txt in this folder"),
        ("enwik8", "a.zip", r"a\.zip: an archive or a table; make it a text file"),
        ("text_file", "latin", r"b\.txt: byte 0xe9 at offset 3 is not UTF-8 .*windows-1252 "),
        ("text_file", "utf-16.txt", "iconv -f utf-16 -t utf-8"),
        ("text_file", "a.txt.gz", "at offset 1 is not UTF-8 .*; unpack it if it is compressed"),
        ("text_file", "no-mark.txt", r"unpack it .*, or convert it \(iconv -f utf-16 -t utf-8\)"),
        ("text_file", "empty.txt", "has no train text"),
        ("text_file", "one.txt", r"no train text, only .* data\.max_characters"),
        ("python_docs", "a.txt", "takes no data.path; use data.name=text_file"),
    ],
)
def test_a_path_that_holds_no_corpus_is_refused_in_one_line(
    tmp_path, name: CorpusName, path: str, match: str
) -> None:
    (tmp_path / "folder.txt" / "inner.txt").mkdir(parents=True)
    for file, content in {
        "a.zip": b"PK", "empty.txt": b"", "one.txt": b"ab", "latin/a.txt": b"fine",
        "latin/b.txt": b"caf\xe9 au lait", "utf-16.txt": TEXT.encode("utf-16"),
        "no-mark.txt": "naïve".encode("utf-16-le"), "a.txt.gz": gzip.compress(TEXT.encode()),
    }.items():  # fmt: skip
        write(tmp_path / file, content)
    with pytest.raises(DataError, match=match) as caught:
        corpus_at(tmp_path / path, name, max_characters=1 if path == "one.txt" else None)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def hub_answers(monkeypatch: pytest.MonkeyPatch, column: str, splits: dict[str, list[str]]) -> None:
    """Put tables in the place of the Hub."""
    import datasets

    def load_dataset(*_: Any, **__: Any) -> datasets.DatasetDict:
        return datasets.DatasetDict(
            {name: datasets.Dataset.from_dict({column: rows}) for name, rows in splits.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "reach", lambda repository: None)


def test_tables_are_downloaded_from_the_hub_as_they_are(tmp_path) -> None:
    import datasets

    for split in ("train", "validation", "test"):
        shakespeare = f"karpathy/tiny_shakespeare/{split}-00000-of-00001.parquet"
        treebank = f"ptb-text-only/ptb_text_only/penn_treebank/{split}/0000.parquet"
        for path, rows in (
            (shakespeare, [{"text": f"{split}\r\n"}]),
            (treebank, [{"sentence": f"the <unk> of {split}"}, {"sentence": "no"}]),
        ):
            datasets.Dataset.from_list(rows).to_parquet(write(tmp_path / "datasets" / path, ""))
    program = (
        "from invformer.config.schema import DataConfig\n"
        "from invformer.data.corpora import read_corpus\n"
        "for name in ('tiny_shakespeare', 'ptb'):\n"
        "    corpus = read_corpus(DataConfig(name=name))\n"
        "    print(corpus.source, [corpus.split(split) for split in ('train', 'val')])"
    )
    with fake_hub.serve(tmp_path) as environment:
        done = python("-c", program, **environment)
    assert done.stdout.splitlines() == [
        r"Hugging Face Hub, karpathy/tiny_shakespeare ['train\r\n', 'validation\r\n']",
        "Hugging Face Hub, ptb-text-only/ptb_text_only "
        r"['the_<unk>_of_train\nno\n', 'the_<unk>_of_validation\nno\n']",
    ], done.stderr


def test_wikitext_gets_its_blank_lines_back(monkeypatch) -> None:
    rows = ["", " = Title = \n", "", " A sentence . \n"]
    hub_answers(monkeypatch, "text", {s: rows for s in ("train", "validation", "test")})
    corpus = read_corpus(DataConfig(name="wikitext2"))
    assert corpus.split("val") == " \n = Title = \n \n A sentence . \n"


@pytest.mark.parametrize("name", ["text8", "enwik8"])
def test_a_copy_that_is_not_the_benchmark_is_refused(monkeypatch, name: CorpusName) -> None:
    hub_answers(monkeypatch, "text", {s: ["é"] for s in ("train", "validation", "test")})
    with pytest.raises(DataError, match="instead of 100000000"):
        read_corpus(DataConfig(name=name))


def test_a_hub_that_accepts_and_says_nothing_is_not_waited_for(monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with closing(FakeServer("hangs")) as server:
        for endpoint in (server.url, "http://127.0.0.1:1"):
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            with pytest.raises(DataError, match=r"text8: cannot be loaded .*set data\.path") as e:
                read_corpus(DataConfig(name="text8"))
            assert "\n" not in str(e.value)


def test_a_damaged_copy_of_the_hub_is_one_line(tmp_path, monkeypatch) -> None:
    import datasets

    load = datasets.load_dataset
    files = {s: str(tmp_path / f"{s}.parquet") for s in ("train", "validation", "test")}
    for split, file in files.items():
        datasets.Dataset.from_dict({"text": [f"text of {split}\r\n" * 50]}).to_parquet(file)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: load("parquet", data_files=files))
    monkeypatch.setattr(hub, "reach", lambda repository: None)
    config = DataConfig(name="tiny_shakespeare")
    read_corpus(config)
    (kept,) = (tmp_path / "cache").rglob("parquet-train.arrow")
    kept.write_bytes(kept.read_bytes()[:900])
    with pytest.raises(DataError, match=r"cannot be loaded .*delete what was"):
        read_corpus(config)
