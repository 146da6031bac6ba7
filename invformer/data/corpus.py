"""A corpus: three texts that share nothing, read piece by piece so that no text is too long."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from invformer.config.schema import Split
from invformer.errors import DataError

Unit = Literal["characters", "bytes"]
Sizes = dict[Split, int]
Pieces = Callable[[], Iterable[str]]  # a text from its beginning, at every call
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from, to choose by, and to report on; all but the first may be empty.

    In a corpus of bytes the byte b is the character chr(b).

    Attributes:
        name: of the corpus.
        pieces: training, validation and test text, one after the other.
        sizes: characters of each.
        sha256: of the texts and of where they part.
        source: where they came from, in words.
        unit: what a character is.
    """

    name: str
    pieces: Pieces = field(repr=False, compare=False)
    sizes: Sizes
    sha256: str
    source: str
    unit: Unit = "characters"

    def read(self, *splits: Split) -> Iterator[str]:
        """The texts of some splits, in pieces."""
        for split, part in parts(self.pieces, self.sizes):
            if split in splits:
                yield from part

    def split(self, name: Split) -> str:
        """The text of one split in memory, or a DataError if there is none."""
        self.size(name)
        return "".join(self.read(name))

    def size(self, name: Split) -> int:
        """Characters of a split, or a DataError if it has none."""
        if not self.sizes[name]:
            raise DataError(
                f"{self.name} ({self.source}) has no {name} text, only {self.lengths()}; check the "
                "files, data.val_fraction, data.test_fraction and data.max_characters"
            )
        return self.sizes[name]

    def lengths(self) -> str:
        """How long the splits are, in words."""
        sizes = ", ".join(f"{size:,} ({name})" for name, size in self.sizes.items())
        return f"{sizes} {self.unit}"


class Stream:
    """The characters of a text, taken in order."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self.pieces = iter(pieces)
        self.rest = ""

    def take(self, count: int) -> Iterator[str]:
        """The next ``count`` characters, in pieces."""
        while count:
            piece = self.rest or next(self.pieces, None)
            if piece is None:
                raise DataError("the text became shorter while it was read; start again")
            part, self.rest = piece[:count], piece[count:]
            count -= len(part)
            yield part


def parts(pieces: Pieces, sizes: Sizes) -> Iterator[tuple[Split, Iterator[str]]]:
    """Each split and its text in pieces, which can be read until the next split is asked for."""
    stream = Stream(pieces())
    for split in SPLITS:
        part = stream.take(sizes[split])
        yield split, part
        deque(part, maxlen=0)  # pass over what was not read


def in_memory(texts: dict[Split, str]) -> tuple[Pieces, Sizes]:
    """Three texts as a corpus reads them."""
    return lambda: [texts[split] for split in SPLITS], {s: len(texts[s]) for s in SPLITS}


def in_bytes(pieces: Pieces, sizes: Sizes) -> tuple[Pieces, Sizes]:
    """The same texts with a character chr(b) for every byte b of their UTF-8."""
    counts: Sizes = {s: sum(len(p.encode()) for p in part) for s, part in parts(pieces, sizes)}
    return lambda: (piece.encode().decode("latin-1") for piece in pieces()), counts


def shortened(pieces: Pieces, sizes: Sizes, max_characters: int) -> tuple[Pieces, Sizes]:
    """Of each split the beginning, all in the same proportion."""
    total = sum(sizes.values())
    kept: Sizes = {split: size * max_characters // total for split, size in sizes.items()}

    def beginnings() -> Iterator[str]:
        for split, part in parts(pieces, sizes):
            yield from Stream(part).take(kept[split])

    return beginnings, kept


def digest(pieces: Pieces, sizes: Sizes, unit: Unit) -> str:
    """SHA-256 of the texts, each after its name and length."""
    encoding = "latin-1" if unit == "bytes" else "utf-8"
    sha = hashlib.sha256()
    for split, part in parts(pieces, sizes):
        sha.update(f"{split} {sizes[split]}\n".encode())
        for piece in part:
            sha.update(piece.encode(encoding))
    return sha.hexdigest()
