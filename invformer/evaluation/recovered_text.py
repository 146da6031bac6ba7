"""A text beside the text recovered from its states: damage on the way, and what is shown of it."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.data.vocabulary import Vocabulary, raw_bytes
from invformer.numerics.precision import at_least_single
from invformer.runs.console import printable

WIDTH = 72  # characters of text on a line
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def perturb(
    z: Float[Tensor, "tokens width"], noise: float, bits: int | None, seed: int
) -> tuple[Float[Tensor, "tokens width"], Tensor | None]:
    """States with Gaussian noise added, then rounded to a number of bits, if there is one.

    And how far an entry may be off, if it was rounded only: half a level, and 2⁻¹⁶ of the range for
    the rounding of the forward pass. The noise is in units of the states' root mean square. The
    levels that bits number are evenly spaced between the least and the largest value. States in
    half precision become float32 first: float16 has no number for the 65536th level.
    """
    z, within = at_least_single(z), None
    if noise:
        generator = torch.Generator().manual_seed(seed)
        size = noise * z.square().mean().sqrt()
        z = z + size * torch.randn(z.shape, generator=generator).to(z)
    if bits is not None:
        least, largest = z.aminmax()
        step = (largest - least) / (2**bits - 1)
        z = least + ((z - least) / step).round() * step if step > 0 else z
        within = None if noise else step / 2 + 2.0**-16 * (largest - least)
    return z, within


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


def print_recovered(text: str | None, recovered: str, proven: Sequence[bool]) -> None:
    """Print original, recovered text and :func:`marks`, under one another."""
    rows = [("recovered", recovered), ("proven", marks(text, recovered, proven))]
    if text is not None:
        rows.insert(0, ("text", text))
    for start in range(0, len(recovered), WIDTH):
        for name, row in rows:
            part = row[start : start + WIDTH].translate(LINE_BREAKS)
            print(f"  {name:<10} {printable(part)}")
    if not all(proven):
        print("✓ proven   · not proven   ✗ wrong")
