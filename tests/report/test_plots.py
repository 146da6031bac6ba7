"""The picture of a run: drawn from metrics.jsonl alone, no global state."""

import math
from pathlib import Path

import pytest

from invformer.nn.certificate import Certificate
from invformer.report.plots import (
    draw_summary,
    in_words,
    last_constants,
    plot_run,
    read_curves,
    running_mean,
)
from invformer.report.table import title_of
from tests.support.processes import python
from tests.support.small_runs import write_rows

BRANCHES = [f"block_0{i}/{kind}" for i in range(2) for kind in ("attention", "feed_forward")]
LEVELS = {"estimate": 0.1, "local_bound": 0.3, "bound": 0.6}


def write_metrics(path: Path, num_steps: int = 12) -> Path:
    """A small run of two blocks, validated every four steps, with an infinity on the way."""
    rows = {}
    for step in range(num_steps):
        rows[step] = row = {"train/bpc": 3.0 + 2.0 / (step + 1), "lipschitz/target": 0.7}
        if step % 4 == 3:
            for branch in BRANCHES:
                row |= {f"lipschitz_branches/{branch}/{k}": v for k, v in LEVELS.items()}
            row |= {f"lipschitz/{k}": v for k, v in LEVELS.items()}
            row |= {
                "val/bpc": 3.1 + 2.0 / step,
                "inverse/reconstruction_max": math.inf if step == 3 else 2e-6,
                "inverse/num_steps_mean": 8.5,
                "inverse/characters_recovered": 1.0,
            }
    write_rows(path, rows)
    return path


@pytest.mark.parametrize("row", [{"optim/lr": 0.1}, {"train/bpc": math.nan}, {"val/bpc": 4.0}])
def test_a_run_of_whatever_length_has_its_picture(tmp_path: Path, row: dict[str, float]) -> None:
    write_rows(tmp_path / "metrics.jsonl", {0: row})
    path = tmp_path / "a.png"
    plot_run(read_curves(tmp_path / "metrics.jsonl"), path, "a sample, 5 $", ngram=None)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_every_branch_has_its_estimate_below_its_local_bound_below_its_bound(
    tmp_path: Path,
) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    bars = draw_summary(curves, last_constants(curves)).axes[2]
    heights = [[bar.get_height() for bar in container] for container in bars.containers]
    assert heights == [[level] * len(BRANCHES) for level in (*LEVELS.values(), 0.7)]
    names = [label.get_text().replace("\n", " ") for label in bars.get_xticklabels()]
    assert names == ["0 attention", "0 feed- forward", "1 attention", "1 feed- forward"]


def test_nothing_that_is_drawn_is_clipped(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    words = in_words(curves, "a sample of 50 characters in a line, and some more " * 40)
    weighted = Certificate(
        "token_max", "global", 0.5, {"a": 0.5}, {"a": 0.4}, {"a": 2.0}, {}, None, "float32", 16
    )
    title = title_of("first", "l2", "books", 0.031, weighted)
    shown = "first: l2 on books (3.1% unknown symbols). Lipschitz constants in weighted token_max"
    assert title == shown
    figure = draw_summary(curves, last_constants(curves), words, 1.5, title)
    assert figure.get_suptitle() == title
    likelihood, course, bars, said = figure.axes
    assert likelihood.get_ylim()[0] < 1.5  # the n-gram
    assert bars.get_ylim()[1] > 0.7
    assert course.get_ylim()[1] > 0.7
    assert "more a" in said.texts[0].get_text()
    figure.draw_without_rendering()
    inside = figure.bbox.padded(1)
    for axes in figure.axes:
        assert all(inside.contains(*corner) for corner in axes.get_tightbbox().corners())


def test_the_running_mean_is_that_of_the_last_values() -> None:
    assert running_mean([1.0, 3.0, 8.0, 4.0], 3) == pytest.approx([1.0, 2.0, 4.0, 5.0])


def test_values_json_has_no_number_for_become_gaps(tmp_path: Path) -> None:
    steps, values = read_curves(write_metrics(tmp_path / "metrics.jsonl"))[
        "inverse/reconstruction_max"
    ]
    assert steps == [3, 7, 11]
    assert math.isnan(values[0])
    assert values[1:] == [2e-6, 2e-6]


def test_plotting_touches_no_global_state_and_importing_loads_no_matplotlib() -> None:
    program = (
        "import sys; from invformer.report.plots import as_png, draw_summary\n"
        "assert 'matplotlib' not in sys.modules\n"
        "as_png(draw_summary({}, {}))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
