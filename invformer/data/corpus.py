"""A corpus: three texts that share nothing, read in pieces, so that they need not fit in memory."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from invformer.config.schema import Split
from invformer.errors import DataError

SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Corpus:
    """Training, validation and test text. In one of bytes the byte b is the character chr(b)."""

    name: str
    source: str  # in words
    # Begins to read the three texts, one after the other.
    pieces: Callable[[], Iterable[str]] = field(repr=False, compare=False)
    sizes: dict[Split, int]  # characters of each
    unit: Literal["characters", "bytes"] = "characters"
    is_cut: bool = False  # by data.val_fraction and data.test_fraction, in characters

    @classmethod
    def of_texts(cls, name: str, source: str, *texts: str) -> "Corpus":
        """A corpus in memory: training, validation and test text."""
        return cls(name, source, lambda: texts, by_split(map(len, texts)))

    def labelled(self) -> Iterator[tuple[Split, str]]:
        """All texts in pieces, each beside its split; the first piece of a split is empty."""
        pieces, rest = iter(self.pieces()), ""
        for split, count in self.sizes.items():
            yield split, ""
            while count:
                piece = rest or next(pieces, None)
                if piece is None:
                    raise DataError("the text became shorter while it was read; start again")
                part, rest = piece[:count], piece[count:]
                count -= len(part)
                yield split, part

    def read(self, *splits: Split) -> Iterator[str]:
        """The texts of some splits, in pieces."""
        return (piece for split, piece in self.labelled() if split in splits)

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

    @property
    def total(self) -> int:
        """Characters of all splits together."""
        return sum(self.sizes.values())

    def fitting(self, seq_len: int) -> str:
        """Settings with which both the training and the validation text fill a window."""
        if not self.is_cut:
            longest = min(self.sizes["train"], self.sizes["val"]) - 1
            return f"set data.seq_len={longest}" if longest > 0 else "use more text"
        # Cutting may move each end by a character, and so may data.max_characters.
        share = min(0.25, math.ceil(100 * (seq_len + 4) / self.total) / 100)
        longest = min(seq_len, int(share * self.total) - 3)
        if longest < 1:
            return "use more text"
        shorter = f" data.seq_len={longest}" if longest < seq_len else ""
        return f"set data.val_fraction={share} data.test_fraction=0{shorter}, or use more text"

    def lengths(self) -> str:
        """How long the splits are, in words."""
        sizes = ", ".join(f"{size:,} ({name})" for name, size in self.sizes.items())
        return f"{sizes} {self.unit}"

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the texts, each after its name and length."""
        sha = hashlib.sha256()
        deque(self.hashed(sha), maxlen=0)
        return sha.hexdigest()

    def hashed(self, sha: Any) -> Iterator[str]:
        """All texts in pieces, each of which updates the hash that becomes :attr:`sha256`."""
        encoding = "latin-1" if self.unit == "bytes" else "utf-8"
        for split, pairs in groupby(self.labelled(), itemgetter(0)):
            sha.update(f"{split} {self.sizes[split]}\n".encode())
            for _, piece in pairs:
                sha.update(piece.encode(encoding))
                yield piece

    def shortened(self, max_characters: int) -> "Corpus":
        """Of each split the beginning, all in the same proportion."""
        sizes = {s: size * max_characters // self.total for s, size in self.sizes.items()}

        def pieces() -> Iterator[str]:
            left = sizes.copy()
            for split, piece in self.labelled():
                yield piece[: left[split]]
                left[split] = max(0, left[split] - len(piece))

        return replace(self, pieces=pieces, sizes=sizes)

    def in_bytes(self) -> "Corpus":
        """The same texts with a character chr(b) for every byte b of their UTF-8."""
        if self.unit == "bytes":
            return self
        sizes = dict.fromkeys(SPLITS, 0)
        for split, piece in self.labelled():
            sizes[split] += len(piece.encode())
        pieces = lambda: map(as_bytes, self.pieces())  # noqa: E731
        return replace(self, pieces=pieces, sizes=sizes, unit="bytes", is_cut=False)


def by_split(sizes: Iterable[int]) -> dict[Split, int]:
    """Characters of the training, validation and test text, named."""
    return dict(zip(SPLITS, sizes, strict=True))


def as_bytes(text: str) -> str:
    """A character chr(b) for every byte b of a text in UTF-8."""
    return text.encode().decode("latin-1")
