"""A text beside the text recovered from its states: damage on the way, and what is shown of it."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.data.vocabulary import Vocabulary, raw_bytes
from invformer.numerics.precision import at_least_single
from invformer.processes.bar import Bar
from invformer.processes.console import printable

WIDTH = 72  # cells of a line of text
NOISE_SEED = 1_000_003  # a model's embeddings are drawn by a small seed
LEAST_ROUNDING = 2.0**-16  # of the largest entry: what a forward pass is assumed to round by
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def perturb(
    z: Float[Tensor, "tokens width"],
    noise: float,
    bits: int | None,
    seed: int,
    rounding: float | None = None,
) -> tuple[Float[Tensor, "tokens width"], dict[str, Tensor]]:
    """Damaged states, and how far they may be off, as :func:`.prefix_margins` takes it.

    Every state is moved by ``noise`` times the states' root mean square length, in a random
    direction. Then its entries are rounded to 2^bits levels, evenly spaced between the least and
    the largest of all. Bounds have room for the rounding of z to its format, ε/2 of the largest
    entry, and of an entry by the forward pass, ``rounding``, by default 2⁻¹⁶ of the largest entry.
    States in half precision become float32 first: float16 has no number for the 65536th level.
    """
    of_format, z = torch.finfo(z.dtype).eps / 2, at_least_single(z)
    clean = z
    length = noise * z.square().sum(-1).mean().sqrt()
    if noise:
        generator = torch.Generator().manual_seed(NOISE_SEED + seed)
        directions = torch.randn(z.shape, generator=generator).to(z)
        z = z + directions * (length / directions.norm(dim=-1, keepdim=True))
    largest = torch.maximum(clean.abs().amax(), z.abs().amax())
    off = of_format * largest + (LEAST_ROUNDING * largest if rounding is None else rounding)
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


def lines_of(text: str, recovered: str, marks: str) -> Iterator[tuple[int, list[str]]]:
    """Text, recovered text and marks under one another, in lines of at most ``WIDTH`` cells.

    Each comes with the number of characters up to its end. The mark of a combining character joins
    that of the character before it: the worse one is shown.
    """
    columns: list[list[str]] = []
    used = end = 0
    for end, (mark, *pair) in enumerate(zip(marks, text, recovered, strict=True)):
        cells = [printable(character.translate(LINE_BREAKS)) for character in pair]
        width = max(map(cell_width, cells))
        if columns and not width:
            *above, old = columns[-1]
            worse = min(old[0], mark, key="✗·✓".index) + old[1:]
            columns[-1] = [*map("".join, zip(above, cells, strict=True)), worse]
            continue
        if columns and used + width > WIDTH:
            yield end, ["".join(row) for row in zip(*columns, strict=True)]
            columns, used = [], 0
        padded = [cell + " " * (width - cell_width(cell)) for cell in cells]
        columns.append([*padded, mark.ljust(width)])
        used += max(width, 1)
    if columns:
        yield end + 1, ["".join(row) for row in zip(*columns, strict=True)]


def cell_width(text: str) -> int:
    """Cells of a terminal that a printable text takes: 2 for wide characters, 0 for combining."""
    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me")
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )  # fmt: skip


class Shown:
    """Prints a text as it comes back: first the nearest symbols, then what is proven.

    Lines are printed as they become complete. Under a single line that the search left as it was
    stand only the marks; else the characters are repeated above them. Bytes are printed at the end,
    because characters may span windows.

    Args:
        vocabulary: of the symbols.
        given: the symbols that went up, if they are known.
        count: the number of symbols.
    """

    def __init__(self, vocabulary: Vocabulary, given: str | None, count: int) -> None:
        self.vocabulary, self.given, self.count = vocabulary, given, count
        self.windows: dict[int, Any] = {}  # what is known of each, by its first position
        self.symbols, self.proven = [""] * count, [False] * count
        self.known, self.is_proof = 0, False
        self.printed = 0  # characters, in this pass
        self.before: list[list[str]] = []  # lines of the first pass
        self.line = 0  # of this pass
        self.bar = Bar(desc="inversion", total=count, unit="characters")

    def __call__(self, start: int, found: Any) -> None:
        """Take what is known of the window that begins at ``start``."""
        if found.tried and not self.is_proof:
            self.bar.close()
            self.bar = Bar(desc="proof", total=self.count, unit="characters")
            self.is_proof, self.printed, self.line = True, 0, 0
        here = slice(start, start + len(found.symbols))
        self.windows[start], self.symbols[here], self.proven[here] = (
            found, found.symbols, found.proven,
        )  # fmt: skip
        self.known = start + found.tried if self.is_proof else here.stop
        if self.is_proof:
            self.bar.set_postfix_str(f"{sum(self.proven):,} proven", refresh=False)
        self.bar.update(self.known - self.bar.n)
        if self.known == self.count:
            self.bar.close()
        if self.known == self.count or not self.vocabulary.is_bytes:
            self.print_lines(is_all=self.known == self.count)

    def print_lines(self, is_all: bool) -> None:
        """Print the complete lines of what is known, or all."""
        if not is_all and self.known - self.printed <= WIDTH // 2:
            return
        first, end = self.printed, self.known
        symbols, sure = "".join(self.symbols[first:end]), self.proven[first:end]
        text = None if self.given is None else self.given[first:end]
        text, recovered, sure = readable(self.vocabulary, text, symbols, sure)
        lines = list(lines_of(text or recovered, recovered, marks(text, recovered, sure)))
        for count, rows in lines if is_all else lines[:-1]:
            self.printed = first + count
            self.print_line(*rows)

    def print_line(self, text: str, recovered: str, marks: str) -> None:
        """Print one line, with what was not printed of it before."""
        before = self.before[self.line : self.line + 1]
        rows = [] if self.given is None else [("text", text)]
        rows.append(("recovered", recovered))
        if not self.is_proof:
            self.before.append([text, recovered])
        else:
            if before == [[text, recovered]]:  # without the rows that stand right above
                rows = [] if len(self.before) == 1 else rows[-1:] if text == recovered else rows
            rows.append(("proven", marks))
        self.line += 1
        self.bar.say("\n".join(f"  {name:<10} {row}" for name, row in rows))

    def finish(self) -> None:
        """Print the rest of what is known."""
        self.bar.close()
        if self.known < self.count:
            self.print_lines(is_all=True)
        if self.is_proof and not all(self.proven):
            print("✓ proven   · not proven   ✗ wrong")
