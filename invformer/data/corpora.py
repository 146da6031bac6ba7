"""Corpora by name: from Python itself, from your files, or from the Hugging Face Hub.

Whatever the source, a corpus is three texts that share nothing, exactly as they were written. Local
files may be larger than the memory.
"""

import codecs
import glob
import hashlib
import io
import os
import platform
import stat
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

from invformer.config.schema import CorpusName, DataConfig
from invformer.data import hub
from invformer.data.corpus import (
    SPLITS,
    Corpus,
    Pieces,
    Sizes,
    Split,
    Unit,
    digest,
    in_bytes,
    in_memory,
    parts,
    shortened,
)
from invformer.data.files import Reader
from invformer.errors import DataError

Texts = dict[Split, str]

# What the files of a split may be called, first match wins. {} is a word for the split.
SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
SPLIT_FILES = ("{}.txt", "ptb.{}.txt", "wiki.{}.raw", "{}-*.parquet")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how such a file begins
# Benchmarks whose splits are the first 90, the next 5 and the last 5 million characters.
HUNDRED_MILLION = ("text8", "enwik8")
# Not Python's own sources: tests, installed packages, and what differs from machine to machine.
FOREIGN_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
FOREIGN_FILES = ("sitecustomize.py", "usercustomize.py")


def read_corpus(config: DataConfig) -> Corpus:
    """The text that a configuration names, in its splits."""
    return load_corpus(
        config.name, config.path, config.val_fraction, config.test_fraction, config.max_characters,
        as_bytes=config.vocabulary == "bytes",
    )  # fmt: skip


def load_corpus(
    name: str,
    path: str | os.PathLike[str] | None = None,
    val_fraction: float = 0.05,
    test_fraction: float = 0.05,
    max_characters: int | None = None,
    as_bytes: bool = False,
) -> Corpus:
    """Read a corpus.

    ``python_docs`` and ``python_stdlib`` come with Python; ``text_file`` is any file, folder or
    pattern; the others come from the Hugging Face Hub, or with ``path`` from local files.

    A local file is cut into contiguous splits, train first and test last. A folder with files
    ``train.txt``, ``valid.txt`` and ``test.txt`` (or ``ptb.train.txt``, ``wiki.train.raw``,
    ``train-*.parquet``; validation and val are understood too) has its splits already, and an
    absent test file leaves the test split empty. Any other folder is the concatenation of the
    ``*.txt`` in it and in its folders, a pattern such as ``books/*.md`` that of the files it
    matches, both in sorted order, and cut like a file.

    Text is read as it is: UTF-8 without exceptions, line ends and byte order marks kept. Two
    corpora are rewritten by convention: ``ptb`` becomes characters as in the literature (a space
    between words is "_", a newline ends a sentence), and ``enwik8`` is read as bytes.

    Args:
        name: of the corpus.
        path: file (any text, or a ``.zip`` with one file in it), folder, pattern or pipe; a
            ``SavedPath`` if a checkpoint names it, of which less is read (``data.files``).
        val_fraction: share of the text for validation, if the corpus has no splits of its own.
        test_fraction: likewise for the test.
        max_characters: each split keeps its beginning, all in the same proportion.
        as_bytes: the text is the bytes of its UTF-8.
    """
    if name not in get_args(CorpusName):
        raise DataError(
            f"there is no corpus {name!r}: pick one of {', '.join(get_args(CorpusName))}"
        )
    unit: Unit = "bytes" if name == "enwik8" else "characters"
    if name in ("python_docs", "python_stdlib"):
        if path is not None:
            raise DataError(
                f"{name} comes with Python and takes no data.path; use data.name=text_file for "
                f"{path}"
            )
        read = read_python_docs if name == "python_docs" else read_python_stdlib
        texts, source = read(val_fraction, test_fraction)
        pieces, sizes = in_memory(texts)
    elif path is not None:
        source = os.path.expanduser(path)
        pieces, sizes = read_local(name, path, val_fraction, test_fraction)
    elif name == "text_file":
        raise DataError("text_file needs data.path=FILE or data.path=FOLDER")
    else:
        texts, source = read_hub(name)
        pieces, sizes = in_memory(texts)
    if name == "ptb":
        pieces, sizes = in_memory(
            {split: words_to_characters("".join(part)) for split, part in parts(pieces, sizes)}
        )
    total = sum(sizes.values())
    if total < 2:
        raise DataError(f"{source}: {total} {unit} of text, nothing to learn from")
    if max_characters is not None and max_characters < total:
        pieces, sizes = shortened(pieces, sizes, max_characters)
    if as_bytes and unit == "characters":
        (pieces, sizes), unit = in_bytes(pieces, sizes), "bytes"
    corpus = Corpus(name, pieces, sizes, digest(pieces, sizes, unit), source, unit)
    corpus.size("train")
    return corpus


def words_to_characters(text: str) -> str:
    """Penn Treebank as characters: a line is a sentence, with "_" between words."""
    return "".join(f"{line.strip(' ').replace(' ', '_')}\n" for line in text.splitlines())


def cut(name: str, total: int, val_fraction: float, test_fraction: float) -> Sizes:
    """Sizes of contiguous splits of n characters.

    They part at ⌊n (1 − val − test)⌋ and ⌊n (1 − test)⌋; with 5 % each these are the splits that
    tiny_shakespeare has on the Hub.
    """
    first = int(total * (1 - val_fraction - test_fraction))
    second = int(total * (1 - test_fraction))
    if name in HUNDRED_MILLION and total == 100_000_000:
        first, second = 90_000_000, 95_000_000
    return {"train": first, "val": second - first, "test": total - second}


def deal(
    documents: dict[str, str], val_fraction: float, test_fraction: float, separator: str = ""
) -> Texts:
    """Give every document to one split, whole.

    In the order of the hashes of their names, so at random but the same everywhere, documents go to
    validation, then to the test, as long as they fit into the share asked for; the rest is trained
    on. Within a split they are sorted by name.
    """
    total = sum(map(len, documents.values()))
    room: dict[Split, float] = {"val": val_fraction * total, "test": test_fraction * total}
    split_of: dict[str, Split] = dict.fromkeys(documents, "train")
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        for split in room:
            if len(documents[name]) <= room[split]:
                split_of[name] = split
                room[split] -= len(documents[name])
                break
    return {
        split: separator.join(documents[n] for n in sorted(documents) if split_of[n] == split)
        for split in SPLITS
    }


# --- Python's own text ---------------------------------------------------------------------------


def read_python_docs(val_fraction: float, test_fraction: float) -> tuple[Texts, str]:
    """The language reference that ``help()`` prints, which ships inside every CPython.

    Some topics repeat parts of longer ones ("try" stands in "compound" as well). From long to
    short, a topic is left out if more than half of it are paragraphs that were seen before.
    """
    try:
        from pydoc_data.topics import topics  # 700 kB that nobody else needs
    except ImportError as error:
        raise DataError(
            f"this Python has no pydoc_data.topics ({error}): use data.name=python_stdlib or "
            "data.name=text_file"
        ) from None
    kept: dict[str, str] = {}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [" ".join(p.split()) for p in topics[name].split("\n\n")]
        repeated = sum(len(p) for p in paragraphs if p in seen)
        if 2 * repeated <= sum(map(len, paragraphs)):
            kept[name] = topics[name]
            seen.update(paragraphs)
    texts = deal(kept, val_fraction, test_fraction, separator="\n")
    return texts, f"pydoc_data.topics of {python()}"


def read_python_stdlib(val_fraction: float, test_fraction: float) -> tuple[Texts, str]:
    """The .py files of Python's standard library, without tests and installed packages.

    A package is dealt out whole, since its modules resemble each other.
    """
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, str] = {}
    for file in python_sources(root):
        package = file.relative_to(root).parts[0]
        packages[package] = packages.get(package, "") + decode_source(file)
    if not packages:
        raise DataError(f"{root}: no .py files; this Python hides its standard library")
    return deal(packages, val_fraction, test_fraction), f"standard library of {python()}"


def python() -> str:
    """The running Python, such as CPython 3.11.7."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def python_sources(root: Path) -> list[Path]:
    """Python's own modules in sorted order."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            f for f in subfolders if f not in FOREIGN_FOLDERS and not f.startswith("config-")
        ]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py")
            and name not in FOREIGN_FILES
            and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def decode_source(file: Path) -> str:
    """A module's text in the encoding it declares."""
    try:
        content = file.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None


# --- Local files and the Hub ---------------------------------------------------------------------


def read_local(
    name: str, path: str | os.PathLike[str], val_fraction: float, test_fraction: float
) -> tuple[Pieces, Sizes]:
    """A file, a folder of splits, or the texts of a folder or a pattern."""
    reader = Reader(path)
    local, files = reader.path, [reader.path]
    if os.path.isdir(local):  # False also for a name that is too long
        if (splits := split_files(local)) is not None:
            sizes: Sizes = {
                split: length(read_files(name, files, path)) for split, files in splits.items()
            }
            return partial(read_files, name, [f for s in SPLITS for f in splits[s]], path), sizes
        files = text_files(name, reader)
    elif reader.is_typed and not os.path.lexists(local):
        found = sorted(map(Path, glob.glob(str(local), recursive=True)))
        files = [file for file in found if not file.is_dir()] or files
    pieces: Pieces = partial(read_files, name, files, path)
    if os.path.exists(local) and stat.S_ISFIFO(local.stat().st_mode):  # which is read once
        text = "".join(pieces())
        pieces = lambda: [text]  # noqa: E731
    return pieces, cut(name, length(pieces()), val_fraction, test_fraction)


def length(pieces: Iterable[str]) -> int:
    """Number of characters."""
    return sum(map(len, pieces))


def split_files(folder: Path) -> dict[Split, list[Path]] | None:
    """The files of each split, or None if the folder has none for training."""
    found: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for split, words in SPLIT_WORDS.items():
        for pattern in (p.format(word) for p in SPLIT_FILES for word in words):
            if files := sorted(folder.glob(pattern)):
                found[split] = files
                break
    if not found["train"]:
        return None
    if not found["val"]:
        raise DataError(
            f"{folder}: it has {found['train'][0].name} but no file for validation; add "
            "valid.txt, or give data.path the file itself to have it cut into splits"
        )
    return found


def text_files(name: str, reader: Reader) -> list[Path]:
    """The texts of a folder without splits, in sorted order."""
    folder = reader.path
    for known in (name, f"{name}.zip"):
        if (folder / known).is_file():
            return [folder / known]
    files = reader.text_files()
    if not files:
        raise DataError(
            f"{folder}: no *.txt in this folder and no train.txt; give data.path a file, or a "
            "pattern such as 'FOLDER/*.md'"
        )
    return files


def read_files(name: str, files: list[Path], path: str | os.PathLike[str]) -> Iterator[str]:
    """The texts of some files below a path, one after the other, in pieces."""
    reader = Reader(path)
    for file in files:
        yield from read_file(name, file, reader)


def read_file(name: str, file: Path, reader: Reader) -> Iterator[str]:
    """The text of a plain file, of the one file in a .zip, or of a .parquet, in pieces."""
    if file.suffix == ".parquet":
        yield hub.read_parquet(name, file, reader)
        return
    decoder = codecs.getincrementaldecoder("latin-1" if name == "enwik8" else "utf-8")()
    num_read = 0
    try:
        for chunk in reader.chunks(file):
            yield decoder.decode(chunk)
            num_read += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = num_read - len(decoder.getstate()[0]) + error.start
        encoding = "utf-16" if error.object[:2] in UTF_16 and offset == 0 else "latin1"
        raise DataError(
            f"{file}: byte 0x{error.object[error.start]:02x} at offset {offset} is not UTF-8 "
            f"({error.reason}); convert the file, for example with iconv -f {encoding} -t utf-8"
        ) from None


def read_hub(name: str) -> tuple[Texts, str]:
    """A corpus from the Hub, in the splits it has there, or in its customary ones."""
    texts, source = hub.read(name)
    length = sum(map(len, texts.values()))
    if name in HUNDRED_MILLION and length != 100_000_000:
        raise DataError(
            f"{source}: {length} characters instead of 100000000; set data.path to a copy of {name}"
        )
    if name == "enwik8":
        text = texts["train"]
        sizes = cut(name, len(text), 0.05, 0.05)
        return {split: "".join(part) for split, part in parts(lambda: [text], sizes)}, source
    return {"train": texts["train"], "val": texts["validation"], "test": texts["test"]}, source
