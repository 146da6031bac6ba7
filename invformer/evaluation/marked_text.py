"""A recovered text in characters for people, and which of them are proven."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from invformer.data.vocabulary import Vocabulary, raw_bytes


@dataclass(frozen=True)
class MarkedText:
    """A text, the one recovered, and :func:`marks` of each of its characters."""

    text: str
    recovered: str
    marks: str


def marks(text: str | None, recovered: str, proven: Iterable[bool]) -> str:
    """For each character ``✗`` if it differs from a text, ``✓`` if it is proven, else ``·``."""
    return "".join(
        "✗" if a != b else "✓" if sure else "·"
        for a, b, sure in zip(text or recovered, recovered, proven, strict=True)
    )


def readable(
    vocabulary: Vocabulary, text: str | None, recovered: str, proven: Sequence[bool]
) -> tuple[str | None, str, Sequence[bool]]:
    """Symbols of a text, those recovered, and which are proven, in characters for people.

    Bytes that came back become characters, proven if all of their bytes are. Others stay symbols:
    they may be no UTF-8.
    """
    if not vocabulary.is_bytes or text not in (None, recovered):
        return text, recovered, proven
    raw = raw_bytes(recovered)
    characters = raw.decode("utf-8", "replace")
    if characters.encode() != raw:
        return text, recovered, proven
    ends = list(accumulate(len(character.encode()) for character in characters))
    shares = tuple(all(proven[a:b]) for a, b in pairwise([0, *ends]))
    return text and characters, characters, shares
