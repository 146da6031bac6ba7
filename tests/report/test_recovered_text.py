"""Damage to states, and what is shown of a recovered text."""

from functools import partial

import pytest
import torch

from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.marked_text import readable
from invformer.report.recovered_text import cell_width, lines_of
from invformer.trained.states import perturb


def test_states_are_rounded_to_the_bits_asked_for() -> None:
    z = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert perturb(z, 0.0, 2, 0)[0].unique().numel() == 4
    assert torch.equal(perturb(z, 0.0, None, 0)[0], z)
    assert torch.equal(perturb(torch.ones(2, 2), 0.0, 2, 0)[0], torch.ones(2, 2))
    noise = perturb(z, 0.5, None, 0)[0] - z
    assert torch.allclose(noise.norm(dim=-1), 0.5 * z.square().sum(-1).mean().sqrt())


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_has_no_direction_of_an_embedding_that_was_drawn_by_the_same_seed(seed: int) -> None:
    torch.manual_seed(seed)
    embedding = torch.nn.Embedding(20, 64).weight.detach()
    noise = perturb(torch.ones(20, 64), 1.0, None, seed)[0] - 1
    assert torch.cosine_similarity(noise, embedding).abs().max() < 0.7


def test_levels_beyond_half_precision_move_its_states_by_at_most_half_a_level() -> None:
    z = torch.randn(50, 8, dtype=torch.float16)
    level = (z.max() - z.min()).item() / (2**16 - 1)
    assert (perturb(z, 0.0, 16, 0)[0] - z).abs().max() <= 0.51 * level


@pytest.mark.parametrize(
    ("noise", "bits"), [(0.0, 3), (0.5, None), (0.5, 3), (1e6, None), (0.0, None)]
)
def test_it_is_known_how_far_damaged_states_may_be_off(noise: float, bits: int | None) -> None:
    z = torch.randn(50, 8)
    changed, known = perturb(z, noise, bits, 0)
    away = changed - z
    sizes = {"entries_within": away.abs().max(), "states_within": away.norm(dim=-1).max()}
    names = {(0.0, 3): ["entries_within"], (0.0, None): []}
    assert list(known) == names.get((noise, bits), ["states_within"])
    for name, bound in known.items():
        assert 0.6 * bound < sizes[name] < bound


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
def test_marks_stand_below_their_characters(
    text: str, recovered: str, marks: str, rows: list[str]
) -> None:
    assert list(lines_of(text, recovered, marks)) == [(len(text), rows)]


@pytest.mark.parametrize("character", ["a", "好", "e\u0301"])
def test_lines_break_at_the_cells_of_a_terminal_and_lose_nothing(character: str) -> None:
    text = character * 100
    found = list(lines_of(text, text, "✓" * len(text)))
    assert "".join(rows[0] for _, rows in found) == text
    assert all(cell_width(row) <= 72 for _, rows in found for row in rows)
    assert found[-1][0] == len(text)
    assert cell_width(found[0][1][0]) == 72
