"""A text beside the text recovered from its states: damage on the way, and what is shown of it."""

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.runs.console import printable

WIDTH = 72  # characters of text on a line
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def perturb(
    z: Float[Tensor, "tokens width"], noise: float, bits: int | None, seed: int
) -> Float[Tensor, "tokens width"]:
    """States with Gaussian noise added, then rounded to a number of bits, if there is one.

    The noise is in units of the states' root mean square. The levels that bits number are evenly
    spaced between the least and the largest value.
    """
    if noise:
        generator = torch.Generator().manual_seed(seed)
        size = noise * z.square().mean().sqrt()
        z = z + size * torch.randn(z.shape, generator=generator).to(z)
    if bits is not None:
        least, largest = z.aminmax()
        step = (largest - least) / (2**bits - 1)
        z = least + ((z - least) / step).round() * step
    return z


def marks(text: str, recovered: str, proven: Iterable[bool]) -> str:
    """For each character ``✗`` if it is wrong, ``✓`` if it is proven, else ``·``."""
    return "".join(
        "✗" if a != b else "✓" if sure else "·"
        for a, b, sure in zip(text, recovered, proven, strict=True)
    )


def as_characters(symbols: str, proven: tuple[bool, ...]) -> tuple[str, tuple[bool, ...]]:
    """Bytes as characters, proven if all of their bytes are; unchanged if they are no UTF-8."""
    raw = symbols.encode("latin-1", "replace")
    text = raw.decode("utf-8", "replace")
    if text.encode() != raw:
        return symbols, proven
    ends = list(accumulate(len(character.encode()) for character in text))
    return text, tuple(all(proven[a:b]) for a, b in pairwise([0, *ends]))


def print_recovered(text: str | None, recovered: str, proven: tuple[bool, ...]) -> None:
    """Print original, recovered text and :func:`marks`, under one another."""
    rows = [("recovered", recovered), ("proven", marks(text or recovered, recovered, proven))]
    if text is not None:
        rows.insert(0, ("text", text))
    for start in range(0, len(recovered), WIDTH):
        for name, row in rows:
            part = row[start : start + WIDTH].translate(LINE_BREAKS)
            print(f"  {name:<10} {printable(part)}")
    if not all(proven):
        print("✓ proven   · not proven   ✗ wrong")
