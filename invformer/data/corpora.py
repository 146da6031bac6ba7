"""Corpora by name: from Python itself, from your files, or from the Hugging Face Hub.

Whatever the source, a corpus is three texts that share nothing, exactly as they were written. Local
files may be larger than the memory.
"""

import codecs
import glob
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import decode_source
from pathlib import Path

from invformer.config.schema import DataConfig, SavedPath, Split
from invformer.data import hub
from invformer.data.corpus import SPLITS, Corpus, by_split
from invformer.data.files import chunks, files_below, require_texts
from invformer.errors import DataError

# What the files of a split may be called, first match wins. {} is a word for the split.
SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
SPLIT_FILES = ("{}.txt", "ptb.{}.txt", "wiki.{}.raw")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how such a file begins
# Benchmarks whose splits are the first 90, the next 5 and the last 5 million characters.
HUNDRED_MILLION = ("text8", "enwik8")
# Not Python's own sources: tests, installed packages, and what differs from machine to machine.
FOREIGN = re.compile(
    r"tests?|idle_test|(site|dist)-packages|__pycache__|config-.*"
    r"|(site|user)customize\.py|_sysconfigdata.*"
)


def read_corpus(config: DataConfig) -> Corpus:
    """The text that a configuration names, in its splits.

    ``python_docs`` and ``python_stdlib`` come with Python; ``text_file`` is any file, folder,
    pattern or pipe; the others come from the Hugging Face Hub, or with ``path`` from local files.

    A local file is cut into contiguous splits, train first and test last. A folder with files
    ``train.txt``, ``valid.txt`` and ``test.txt`` (or ``ptb.train.txt``, ``wiki.train.raw``;
    validation and val are understood too) has its splits already, and an absent test file leaves
    the test split empty. Any other folder is the concatenation of the ``*.txt`` in it and in its
    folders, a pattern such as ``books/*.md`` that of the files it matches, both in sorted order,
    and cut like a file.

    Text is read as it is: UTF-8 without exceptions, line ends kept. A byte order mark at the
    beginning of a file says how the file is encoded, and is no part of its text. Two corpora are
    rewritten by convention: ``ptb`` becomes characters as in the literature (a space between words
    is "_", a newline ends a sentence), and ``enwik8`` is read as bytes.
    """
    if config.name in ("python_docs", "python_stdlib"):
        if config.path is not None:
            raise DataError(
                f"{config.name} comes with Python and takes no data.path; use data.name=text_file "
                f"for {config.path}"
            )
        corpus = read_python_docs(config) if config.name == "python_docs" else read_stdlib(config)
    elif config.path is not None:
        corpus = read_local(config, config.path)
    else:
        corpus = read_hub(config)
    if config.name == "ptb":
        texts = (words_to_characters("".join(corpus.read(split))) for split in SPLITS)
        corpus = Corpus.of_texts(config.name, corpus.source, *texts)
    if config.max_characters is not None and config.max_characters < corpus.total:
        corpus = corpus.shortened(config.max_characters)
    if config.vocabulary == "bytes":
        corpus = corpus.in_bytes()
    corpus.size("train")  # raises if there is none
    return corpus


def words_to_characters(text: str) -> str:
    """Penn Treebank as characters: a line, ended by "\\n", is a sentence, with "_" in it."""
    lines = (text if text.endswith("\n") or not text else f"{text}\n").split("\n")[:-1]
    return "".join(f"{line.strip(' ').replace(' ', '_')}\n" for line in lines)


def cut(config: DataConfig, total: int) -> dict[Split, int]:
    """Sizes of contiguous splits of n characters.

    They part at ⌊n (1 − val − test)⌋ and ⌊n (1 − test)⌋; with 5 % each these are the splits that
    tiny_shakespeare has on the Hub.
    """
    first = int(total * (1 - config.val_fraction - config.test_fraction))
    second = int(total * (1 - config.test_fraction))
    if config.name in HUNDRED_MILLION and total == 100_000_000:
        first, second = 90_000_000, 95_000_000
    return by_split([first, second - first, total - second])


def deal(config: DataConfig, documents: dict[str, str], separator: str = "") -> list[str]:
    """Give every document to one split, whole.

    In the order of the hashes of their names, so at random but the same everywhere, documents go to
    validation, then to the test, as long as they fit into the share asked for; the rest is trained
    on. Within a split they are sorted by name.
    """
    total = sum(map(len, documents.values()))
    room: dict[Split, float] = {
        "val": config.val_fraction * total, "test": config.test_fraction * total
    }  # fmt: skip
    split_of: dict[str, Split] = dict.fromkeys(documents, "train")
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        for split in room:
            if len(documents[name]) <= room[split]:
                split_of[name] = split
                room[split] -= len(documents[name])
                break
    return [
        separator.join(documents[n] for n in sorted(documents) if split_of[n] == split)
        for split in SPLITS
    ]


# --- Python's own text ---------------------------------------------------------------------------


def read_python_docs(config: DataConfig) -> Corpus:
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
    texts = deal(config, kept, separator="\n")
    return Corpus.of_texts(config.name, f"pydoc_data.topics of {python()}", *texts)


def read_stdlib(config: DataConfig) -> Corpus:
    """The .py files of Python's standard library, without tests and installed packages.

    A package is dealt out whole, since its modules resemble each other.
    """
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, str] = {}
    for file in files_below(root, ".py", FOREIGN):
        package = file.relative_to(root).parts[0]
        try:
            packages[package] = packages.get(package, "") + decode_source(file.read_bytes())
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: {error}") from None
    texts = deal(config, packages)
    return Corpus.of_texts(config.name, f"standard library of {python()}", *texts)


def python() -> str:
    """The running Python, such as CPython 3.11.7."""
    return f"{platform.python_implementation()} {platform.python_version()}"


# --- Local files and the Hub ---------------------------------------------------------------------


def read_local(config: DataConfig, path: str) -> Corpus:
    """A file, a folder of splits, or the texts of a folder or a pattern."""
    path = type(path)(os.path.expanduser(path))
    splits = split_files(Path(path)) if os.path.isdir(path) else None
    files = [f for s in SPLITS for f in splits[s]] if splits else text_files(config.name, path)
    require_texts(files, path)
    read = partial(read_files, config.name, path)
    pieces = partial(read, files)
    if files[0].is_fifo():  # which is read once
        text = "".join(pieces())
        pieces = lambda: [text]  # noqa: E731
    if splits:
        sizes = by_split(sum(map(len, read(splits[split]))) for split in SPLITS)
    else:
        sizes = cut(config, sum(map(len, pieces())))
    unit = "bytes" if config.name == "enwik8" else "characters"
    return Corpus(config.name, path, pieces, sizes, unit, is_cut=not splits)


def split_files(folder: Path) -> dict[Split, list[Path]] | None:
    """The files of each split, or None if there are none for training."""
    found: dict[Split, list[Path]] = {}
    for split, words in SPLIT_WORDS.items():
        patterns = (p.format(word) for p in SPLIT_FILES for word in words)
        matches = (sorted(folder.glob(pattern)) for pattern in patterns)
        found[split] = next(filter(None, matches), [])
    if found["train"] and not found["val"]:
        raise DataError(
            f"{folder}: it has {found['train'][0].name} but no file for validation; add "
            "valid.txt, or give data.path the file itself to have it cut into splits"
        )
    return found if found["train"] else None


def text_files(name: str, path: str) -> list[Path]:
    """The file of a path, the texts of a folder, or the files that a pattern matches; sorted."""
    file = Path(path)
    if not os.path.isdir(path):  # False also for a name that is too long
        # A checkpoint names no tree of folders: with links in it, it may have no end.
        is_name = os.path.lexists(path) or (isinstance(path, SavedPath) and "**" in path)
        found = [] if is_name else sorted(map(Path, glob.glob(path, recursive=True)))
        return [match for match in found if not match.is_dir()] or [file]
    if os.path.isfile(file / name):  # enwik8, for one, has no suffix
        return [file / name]
    if files := files_below(file, ".txt"):
        return files
    raise DataError(
        f"{path}: no *.txt in this folder and no train.txt; give data.path a file, or a pattern "
        "such as 'FOLDER/*.md'"
    )


def read_files(name: str, path: str, files: list[Path]) -> Iterator[str]:
    """The texts of files, in pieces."""
    encoding = "latin-1" if name == "enwik8" else "utf-8-sig"  # without a byte order mark
    for file in files:
        yield from decoded(file, chunks(file, path), encoding)


def decoded(file: Path, content: Iterable[bytes], encoding: str) -> Iterator[str]:
    """The text of a file's content; a DataError says where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    num_read = 0
    try:
        for chunk in content:
            num_read += len(chunk)
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = num_read - len(error.object) + error.start
        is_utf_16 = error.object[:2] in UTF_16 and offset == 0
        encoding = "utf-16" if is_utf_16 else "windows-1252"
        hint = f"convert the file, for example with iconv -f {encoding} -t utf-8"
        if b"\0" in error.object and not is_utf_16:
            hint = "unpack it if it is compressed, or convert it (iconv -f utf-16 -t utf-8)"
        raise DataError(
            f"{file}: byte 0x{error.object[error.start]:02x} at offset {offset} is not UTF-8 "
            f"({error.reason}); {hint}"
        ) from None


def read_hub(config: DataConfig) -> Corpus:
    """A corpus from the Hub, in the splits it has there, or in its customary ones."""
    name = config.name
    texts, source = hub.read(name)
    total = sum(map(len, texts.values()))
    if name in HUNDRED_MILLION and total != 100_000_000:
        raise DataError(
            f"{source}: {total} characters instead of 100000000; set data.path to a copy of {name}"
        )
    if name == "enwik8":
        return Corpus(name, source, lambda: [texts["train"]], cut(config, total), "bytes")
    return Corpus.of_texts(name, source, texts["train"], texts["validation"], texts["test"])
