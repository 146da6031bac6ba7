"""Pictures of a run: drawn from metrics.jsonl alone, no global state."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from invformer.errors import StorageError
from invformer.runs.run_log import JsonLinesSink
from invformer.training.plots import (
    draw_bits_per_character,
    draw_inverse,
    draw_lipschitz,
    plot_run,
    read_curves,
    running_mean,
)

PNG = b"\x89PNG\r\n\x1a\n"
BRANCHES = [f"block_0{i}/{kind}" for i in range(2) for kind in ("attention", "feed_forward")]


def write_metrics(path: Path, num_steps: int = 12) -> Path:
    """A small run of two blocks, validated every four steps, with an infinity on the way."""
    sink = JsonLinesSink(path)
    for step in range(num_steps):
        row = {"train/bpc": 3.0 + 2.0 / (step + 1), "lipschitz/target": 0.7}
        for branch in BRANCHES:
            row[f"lipschitz_branches/{branch}/estimate"] = 0.1 + 0.01 * step
            row[f"lipschitz_branches/{branch}/bound"] = 0.7
        if step % 4 == 3:
            row |= {f"lipschitz_branches/{branch}/local_bound": 0.3 for branch in BRANCHES}
            row |= {
                "val/bpc": 3.1 + 2.0 / step,
                "inverse/residual_max": 1e-6,
                "inverse/error_bound_max": math.inf if step == 3 else 1e-5,
                "inverse/reconstruction_max": 0.0 if step == 3 else 2e-6,
                "inverse/num_steps_mean": 8.5,
                "inverse/converged_fraction": 1.0,
                "inverse/characters_recovered": 1.0,
            }
        sink(step, row)
    return path


def test_a_run_leaves_three_pictures(tmp_path: Path) -> None:
    written = plot_run(write_metrics(tmp_path / "metrics.jsonl"), tmp_path)
    assert [path.name for path in written] == ["bpc.png", "lipschitz.png", "inverse.png"]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink(0, {"train/bpc": 4.0})
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path) == [tmp_path / "bpc.png"]


def test_a_baseline_without_bounds_has_its_estimates_drawn() -> None:
    key = "lipschitz_branches/block_00/attention/estimate"
    figure = draw_lipschitz({key: ([0, 1], [3.0, 4.0]), "lipschitz/estimate": ([0], [9.0])})
    assert figure is not None
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[3.0, 4.0]]


def test_axes_are_named_with_their_units(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    figures = [
        draw_bits_per_character(curves),
        draw_lipschitz(curves),
        draw_inverse(curves),
    ]
    assert all(figure is not None for figure in figures)
    axes = [one for figure in figures if figure is not None for one in figure.axes]
    assert all(one.get_ylabel() for one in axes)
    bottoms = [figure.axes[-1].get_xlabel() for figure in figures if figure is not None]
    assert bottoms == ["optimiser step"] * 3
    assert axes[0].get_ylabel() == "bits per character"
    assert "attention" in axes[1].get_ylabel()
    assert "feed-forward" in axes[2].get_ylabel()


def test_estimates_local_bounds_and_the_target_are_drawn_for_every_kind(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    figure = draw_lipschitz(curves)
    assert figure is not None
    for axes in figure.axes:
        assert {line.get_ydata()[0] for line in axes.lines} == {0.1, 0.3, 0.7}
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["block 00, estimate", "local bounds", "block 01, estimate", "target 0.7"]


def test_blocks_differ_in_greyscale_and_the_key_names_the_first_and_the_last() -> None:
    curves = {
        f"lipschitz_branches/block_{i:02d}/attention/estimate": ([0, 1], [0.1, 0.2])
        for i in range(64)
    }
    figure = draw_lipschitz(curves)
    assert figure is not None
    (axes,) = figure.axes
    greys = [sum(line.get_color()[:3]) for line in axes.lines]
    assert max(greys) - min(greys) > 0.8
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["block 00, estimate", "block 63, estimate"]


def test_the_running_mean_is_that_of_the_last_finite_values() -> None:
    values = [math.nan, 1.0, 2.0, math.nan, 6.0, *torch.arange(5.0).tolist()]
    naive = []
    for end in range(1, len(values) + 1):
        recent = [v for v in values[max(0, end - 3) : end] if math.isfinite(v)]
        naive.append(sum(recent) / len(recent) if recent else math.nan)
    assert running_mean(values, 3) == pytest.approx(naive, nan_ok=True)


def test_values_json_has_no_number_for_become_gaps(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    steps, values = curves["inverse/error_bound_max"]
    assert steps == [3, 7, 11]
    assert math.isnan(values[0])
    assert values[1:] == [1e-5, 1e-5]


def test_a_folder_that_is_gone_is_one_clear_line(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"gone.bpc\.png: cannot be written"):
        plot_run(metrics, tmp_path / "gone")


def test_plotting_touches_no_global_state_and_importing_loads_no_matplotlib(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", num_steps=4)
    program = (
        "import sys; from pathlib import Path; from invformer.training.plots import plot_run\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"plot_run(Path({str(metrics)!r}), Path({str(tmp_path)!r}))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
