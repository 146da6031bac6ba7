"""A text beside the text recovered from its states: damage on the way, and what is shown of it."""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.runs.console import printable

WIDTH = 72  # characters of text on a line
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def perturb(
    z: Float[Tensor, "tokens width"], noise: float, bits: int | None, seed: int
) -> Float[Tensor, "tokens width"]:
    """States with Gaussian noise added, then rounded to a number of bits.

    Args:
        z: states.
        noise: standard deviation, in units of the states' root mean square.
        bits: levels are evenly spaced between the least and the largest value; None rounds nothing.
        seed: of the noise.
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


def print_side_by_side(text: str | None, recovered: str, proven: tuple[bool, ...]) -> None:
    """Print original, recovered text and a mark for each character, under one another.

    The marks: ``✓`` proven, ``·`` not proven, ``✗`` wrong.
    """
    wrong = [text is not None and a != b for a, b in zip(text or recovered, recovered, strict=True)]
    marks = "".join("✗" if w else "✓" if p else "·" for w, p in zip(wrong, proven, strict=True))
    for start in range(0, len(recovered), WIDTH):
        part = slice(start, start + WIDTH)
        rows = [("recovered", recovered), ("proven", marks)]
        for name, row in [("text", text), *rows] if text is not None else rows:
            print(f"  {name:<10} {printable(row[part].translate(LINE_BREAKS))}")
