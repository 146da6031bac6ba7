"""Corpora by name: from Python itself, from your files, or from the Hugging Face Hub.

Whatever the source, a corpus is three texts that share nothing, exactly as they were written.
"""

import glob
import hashlib
import io
import os
import platform
import sysconfig
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from invformer.config.schema import CorpusName, DataConfig
from invformer.data import hub
from invformer.data.files import Reader, read_bytes
from invformer.errors import DataError

Split = Literal["train", "val", "test"]
Texts = dict[Split, str]
SPLITS: tuple[Split, ...] = get_args(Split)

# What the files of a split may be called, first match wins. {} is a word for the split.
SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
SPLIT_FILES = ("{}.txt", "ptb.{}.txt", "wiki.{}.raw", "{}-*.parquet")
# Benchmarks whose splits are the first 90, the next 5 and the last 5 million characters.
HUNDRED_MILLION = ("text8", "enwik8")
# Not Python's own sources: tests, installed packages, and what differs from machine to machine.
FOREIGN_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
FOREIGN_FILES = ("sitecustomize.py", "usercustomize.py")


@dataclass(frozen=True)
class Corpus:
    """Three texts to learn from, to choose by, and to report on; ``test`` may be empty.

    ``sha256`` is that of the texts and where they part, ``source`` says in words where they came
    from. In a corpus of bytes the byte b is the character chr(b).
    """

    name: str
    train: str = field(repr=False)
    val: str = field(repr=False)
    test: str = field(repr=False)
    sha256: str
    source: str
    unit: Literal["characters", "bytes"] = "characters"

    def split(self, name: Split) -> str:
        """The text of one split, or a DataError if there is none."""
        text = {"train": self.train, "val": self.val, "test": self.test}[name]
        if not text:
            raise DataError(
                f"{self.name} ({self.source}) has no {name} text, only {self.lengths()}; check the "
                "files, data.val_fraction, data.test_fraction and data.max_characters"
            )
        return text

    def whole(self) -> str:
        """The text of all splits, one after the other."""
        return self.train + self.val + self.test

    def lengths(self) -> str:
        """How long the splits are, in words."""
        sizes = ", ".join(f"{len(getattr(self, name)):,} ({name})" for name in SPLITS)
        return f"{sizes} {self.unit}"


def read_corpus(config: DataConfig) -> Corpus:
    """The text that a configuration names, in its splits."""
    return load_corpus(
        config.name, config.path, config.val_fraction, config.test_fraction, config.max_characters
    )


def load_corpus(
    name: str,
    path: str | os.PathLike[str] | None = None,
    val_fraction: float = 0.05,
    test_fraction: float = 0.05,
    max_characters: int | None = None,
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
    """
    if name not in get_args(CorpusName):
        raise DataError(
            f"there is no corpus {name!r}: pick one of {', '.join(get_args(CorpusName))}"
        )
    unit = "bytes" if name == "enwik8" else "characters"
    texts: Texts
    if name in ("python_docs", "python_stdlib"):
        if path is not None:
            raise DataError(
                f"{name} comes with Python and takes no data.path; use data.name=text_file for "
                f"{path}"
            )
        read = read_python_docs if name == "python_docs" else read_python_stdlib
        texts, source = read(val_fraction, test_fraction)
    elif path is not None:
        texts, source = read_local(name, Reader(path), val_fraction, test_fraction)
    elif name == "text_file":
        raise DataError("text_file needs data.path=FILE or data.path=FOLDER")
    else:
        texts, source = read_hub(name)
    if name == "ptb":
        texts = {split: words_to_characters(text) for split, text in texts.items()}
    total = sum(map(len, texts.values()))
    if total < 2:
        raise DataError(f"{source}: {total} {unit} of text, nothing to learn from")
    if max_characters is not None and max_characters < total:
        texts = {
            split: text[: len(text) * max_characters // total] for split, text in texts.items()
        }
    corpus = Corpus(name, **texts, sha256=digest(texts, unit), source=source, unit=unit)
    corpus.split("train")
    return corpus


def digest(texts: Texts, unit: str) -> str:
    """SHA-256 of the texts, each after its name and length."""
    encoding = "latin-1" if unit == "bytes" else "utf-8"
    sha = hashlib.sha256()
    for split in SPLITS:
        sha.update(f"{split} {len(texts[split])}\n".encode())
        sha.update(texts[split].encode(encoding))
    return sha.hexdigest()


def words_to_characters(text: str) -> str:
    """Penn Treebank as characters: a line is a sentence, with "_" between words."""
    return "".join(f"{line.strip(' ').replace(' ', '_')}\n" for line in text.splitlines())


def cut(name: str, text: str, val_fraction: float, test_fraction: float) -> Texts:
    """Contiguous splits: train, then val, then test.

    They part at ⌊n (1 − val − test)⌋ and ⌊n (1 − test)⌋; with 5 % each these are the splits that
    tiny_shakespeare has on the Hub.
    """
    first = int(len(text) * (1 - val_fraction - test_fraction))
    second = int(len(text) * (1 - test_fraction))
    if name in HUNDRED_MILLION and len(text) == 100_000_000:
        first, second = 90_000_000, 95_000_000
    return {"train": text[:first], "val": text[first:second], "test": text[second:]}


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
    content = read_bytes(file)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None


# --- Local files and the Hub ---------------------------------------------------------------------


def read_local(
    name: str, reader: Reader, val_fraction: float, test_fraction: float
) -> tuple[Texts, str]:
    """A file, a folder of splits, or the texts of a folder or a pattern."""
    path, files = reader.path, [reader.path]
    if os.path.isdir(path):  # False also for a name that is too long
        if (splits := split_files(path)) is not None:
            texts: Texts = {
                split: "".join(read_file(name, file, reader) for file in files)
                for split, files in splits.items()
            }
            return texts, str(path)
        files = text_files(name, reader)
    elif reader.is_typed and not os.path.lexists(path):
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = [file for file in found if not file.is_dir()] or files
    text = "".join(read_file(name, file, reader) for file in files)
    return cut(name, text, val_fraction, test_fraction), str(path)


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
    files = reader.text_files(folder)
    if not files:
        raise DataError(
            f"{folder}: no *.txt in this folder and no train.txt; give data.path a file, or a "
            "pattern such as 'FOLDER/*.md'"
        )
    return files


def read_file(name: str, file: Path, reader: Reader) -> str:
    """The text of a plain file, of the one file in a .zip, or of a .parquet."""
    if file.suffix == ".parquet":
        return hub.read_parquet(name, file, reader)
    content = reader.read(file)
    if name == "enwik8":
        return content.decode("latin-1")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8 "
            f"({error.reason}); convert the file, for example with iconv -f latin1 -t utf-8"
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
        return cut(name, texts["train"], 0.05, 0.05), source
    return {"train": texts["train"], "val": texts["validation"], "test": texts["test"]}, source
