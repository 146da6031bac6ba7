"""A text beside the text recovered from its states, as it is shown."""

import math
import unicodedata
from collections.abc import Iterator
from operator import eq
from typing import Any

from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.marked_text import marks, readable
from invformer.numerics.rounding import shortened_down
from invformer.processes.bar import Bar
from invformer.processes.console import printable

WIDTH = 72  # cells of a line of text
LINE_BREAKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


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

    def conclusion(
        self, found: Any, is_proof_asked: bool, rounding: float | None, seconds: float
    ) -> Iterator[str]:
        """What was recovered and proven in the end, and by which numbers.

        ``rounding`` is what a forward pass is assumed to round by if the states were damaged.
        """
        count, proven = len(found.symbols), sum(found.proven)
        said = f"{proven} of {count} proven"
        if self.given is not None:
            right = sum(map(eq, self.given, found.symbols))
            unit = "bytes" if self.vocabulary.is_bytes else "characters"
            said = f"{right} of {count} {unit} recovered, {said}"
        if found.unproven:
            said += f" (none: {found.unproven})"
        elif not is_proof_asked:
            said += " (not asked for)"
        elif found.tried < self.count:
            said += f" (the first {found.tried} of {self.count} were tried)"
        yield said
        if rounding is not None and proven:
            yield "proven: every text whose states such damage turns into these begins so,"
            limit = f"{rounding:.2g}: assumed, not proven"
            yield f"if no forward pass rounds an entry by more than {limit}"
        if found.radius > 0:
            radius = shortened_down(found.radius)
            yield f"any other symbols have a state farther than {radius} from the given one"
        if not math.isnan(found.residual):
            bound = found.error_bound
            solver = f", the solver's part at most {bound:.2g}" if bound < 1 else ""
            yield f"error {found.residual:.2g} at the embedding{solver}"
        steps = f"at most {found.num_steps} solver steps in a layer, " if found.num_steps else ""
        yield f"{steps}{seconds:.2f} s"
