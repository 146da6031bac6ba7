"""What is shown of a recovered text."""

from functools import partial

import pytest

from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.marked_text import readable
from invformer.report.recovered_text import cell_width, lines_of


def test_bytes_are_shown_as_the_characters_that_they_are() -> None:
    symbols = "Hé 🦊".encode().decode("latin-1")
    proven = (True, True, False, True, True, True, True, True)
    shown = partial(readable, Vocabulary.of_bytes())
    assert shown(symbols, symbols, proven) == ("Hé 🦊", "Hé 🦊", (True, False, True, True))
    assert shown(None, symbols, proven) == (None, "Hé 🦊", (True, False, True, True))
    for text, recovered in (("ab", "aé"), (None, "\xf0\x9f"), (None, "a\ufffd")):
        assert shown(text, recovered, (True, False)) == (text, recovered, (True, False))


@pytest.mark.parametrize(
    ("text", "recovered", "marks", "rows"),
    [
        ("a好b", "a好b", "✓·✓", ["a好b", "a好b", "✓· ✓"]),
        ("😀!", "?!", "✗✓", ["😀!", "? !", "✗ ✓"]),
        ("e\u0301x", "e\u0301x", "✓·✓", ["e\u0301x", "e\u0301x", "·✓"]),
        ("e\u0301x", "eqx", "✓✗✓", ["e\u0301 x", "eqx", "✓✗✓"]),
        ("\u0301x", "\u0301x", "✓✓", ["\u0301x", "\u0301x", "✓✓"]),
        ("a\u202eb\n", "a\u202eb\n", "✓✓·✓", [r"a\u202eb⏎", r"a\u202eb⏎", "✓✓     ·✓"]),
        ("한글", "한글", "✓✓", ["한글", "한글", "✓ ✓ "]),
    ],
)
def test_marks_stand_below_symbols(text: str, recovered: str, marks: str, rows: list[str]) -> None:
    assert list(lines_of(text, recovered, marks)) == [(len(text), rows)]


@pytest.mark.parametrize("character", ["a", "好", "e\u0301"])
def test_lines_break_at_the_cells_of_a_terminal_and_lose_nothing(character: str) -> None:
    text = character * 100
    found = list(lines_of(text, text, "✓" * len(text)))
    assert "".join(rows[0] for _, rows in found) == text
    assert all(cell_width(row) <= 72 for _, rows in found for row in rows)
    assert found[-1][0] == len(text)
    assert cell_width(found[0][1][0]) == 72
