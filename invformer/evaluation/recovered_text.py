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
NOISE_SEED = 1_000_003  # a model's embeddings are drawn by a small seed
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def perturb(
    z: Float[Tensor, "tokens width"], noise: float, bits: int | None, seed: int
) -> tuple[Float[Tensor, "tokens width"], dict[str, Tensor]]:
    """Damaged states, and how far they may be off, as :func:`.prefix_margins` takes it.

    Every state is moved by ``noise`` times the states' root mean square length, in a random
    direction. Then its entries are rounded to 2^bits levels, evenly spaced between the least and
    the largest of all. Bounds have room for the rounding of z to its format and of a forward pass
    in float32: ε/2 and 2⁻¹⁶ of the largest entry. States in half precision become float32 first:
    float16 has no number for the 65536th level.
    """
    rounding = torch.finfo(z.dtype).eps / 2 + 2.0**-16
    z = clean = at_least_single(z)
    length = noise * z.square().sum(-1).mean().sqrt()
    if noise:
        generator = torch.Generator().manual_seed(NOISE_SEED + seed)
        directions = torch.randn(z.shape, generator=generator).to(z)
        z = z + directions * (length / directions.norm(dim=-1, keepdim=True))
    off = rounding * torch.maximum(clean.abs().amax(), z.abs().amax())
    if bits is not None:
        least, largest = z.aminmax()
        step = (largest - least) / (2**bits - 1)
        z = least + ((z - least) / step).round() * step if step > 0 else z
        off = off + step / 2
    if noise:
        return z, {"states_within": length + off * z.shape[-1] ** 0.5}
    return z, {} if bits is None else {"entries_within": off}


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
