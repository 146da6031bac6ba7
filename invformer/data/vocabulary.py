"""The characters a model knows, in the order of their tokens."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.data.corpus import as_bytes
from invformer.errors import CheckpointError, DataError

UNKNOWN = "\ufffd"
CODE_POINTS = 0x110000
MOST = 1 << 18  # characters that a saved vocabulary may have; Unicode names fewer
SHOWN = 10  # missing characters that an error names
CHUNK = 1 << 22  # characters looked up at a time: bounds the memory that UTF-32 takes


@dataclass(frozen=True)
class Vocabulary:
    """A bijection between characters and tokens 1, 2, …, and token 0 for every other character.

    Characters are Unicode code points. A corpus of bytes serves as well: its bytes are the code
    points 0 to 255.

    Attributes:
        symbols: the symbol of each token: U+FFFD for the unknown token 0, then the characters by
            code point. A U+FFFD of the text itself is an ordinary character with its own token.
    """

    symbols: tuple[str, ...]

    @classmethod
    def from_text(cls, train_text: str | Iterable[str]) -> "Vocabulary":
        """The distinct characters of a text, which should be the training split and no more.

        The text may come in pieces.
        """
        pieces = [train_text] if isinstance(train_text, str) else train_text
        found = np.zeros(CODE_POINTS, bool)
        for codes in (codes for piece in pieces for codes in code_points(piece)):
            found[codes] = True
        characters = list(map(chr, found.nonzero()[0]))
        return cls((UNKNOWN, *characters))

    @classmethod
    def of_bytes(cls) -> "Vocabulary":
        """All 256 bytes, which cover any text in UTF-8."""
        return cls((UNKNOWN, *map(chr, range(256))))

    @cached_property
    def is_bytes(self) -> bool:
        """Whether a text is read as the bytes of its UTF-8."""
        return self == Vocabulary.of_bytes()

    def symbols_of(self, text: str) -> str:
        """A text as a corpus holds it: itself, or a character chr(b) for every byte b."""
        return as_bytes(text) if self.is_bytes else text

    def text_of(self, symbols: Iterable[str]) -> Iterator[str]:
        """The text of symbols, piece by piece: the inverse of :meth:`symbols_of`."""
        if not self.is_bytes:
            return iter(symbols)
        return codecs.iterdecode(map(raw_bytes, symbols), "utf-8", "replace")

    def text(self, tokens: Integer[Tensor, "characters"]) -> str:
        """The text of a sequence of tokens, for people: bytes that are no UTF-8 as U+FFFD."""
        return "".join(self.text_of([self.decode(tokens)]))

    @property
    def size(self) -> int:
        """Number of tokens, the unknown one included."""
        return len(self.symbols)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(self.size - 1)

    def encode(self, text: str) -> Integer[Tensor, "characters"]:
        """The tokens of a text, of :attr:`dtype`; 0 for characters not in the vocabulary."""
        tokens = [self._token_of[codes] for codes in code_points(text)]
        return torch.from_numpy(np.concatenate(tokens))

    def decode(self, tokens: Integer[Tensor, "characters"]) -> str:
        """The text of a sequence of tokens, the unknown token shown as U+FFFD."""
        return "".join(map(self.symbols.__getitem__, tokens.tolist()))

    def require(self, pieces: Iterable[str], name: str) -> None:
        """Raise a DataError that names the characters of a text that are not in the vocabulary."""
        missing = sorted({*Vocabulary.from_text(pieces).symbols[1:]} - {*self.symbols[1:]})
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise DataError(
                f"{name}: the vocabulary of the model lacks {', '.join(map(repr, missing[:SHOWN]))}"
                f"{more}; take these characters out of the text"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and a checkpoint can hold; :meth:`from_dict` reads them."""
        return {"characters": "".join(self.symbols[1:])}

    @classmethod
    def from_dict(cls, state: Any) -> "Vocabulary":
        """The vocabulary that :meth:`to_dict` described, or a CheckpointError."""
        match state:
            case {"characters": str(text)} if (
                0 < len(text) <= MOST and len(state) == 1 and [*text] == sorted({*text})
            ):
                return cls((UNKNOWN, *text))
        raise CheckpointError(
            "the vocabulary is damaged: 'characters' is not a text of distinct, sorted characters"
        )

    @cached_property
    def _token_of(self) -> np.ndarray:
        """The token of every code point, 0 for most."""
        table = np.zeros(CODE_POINTS, self.dtype)
        table[[ord(character) for character in self.symbols[1:]]] = range(1, self.size)
        return table


def raw_bytes(symbols: str) -> bytes:
    """The bytes of symbols; 0xff, which UTF-8 never has, for the unknown one."""
    return symbols.replace(UNKNOWN, "\xff").encode("latin-1")


def code_points(text: str) -> Iterator[np.ndarray]:
    """The code points of a text, so many at a time that they need little memory."""
    for start in range(0, max(1, len(text)), CHUNK):
        part = text[start : start + CHUNK].encode("utf-32-le", "surrogatepass")
        yield np.frombuffer(part, np.uint32)
