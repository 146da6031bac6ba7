"""Pictures of a run: drawn from metrics.jsonl alone, one norm each, no global state."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from invformer.errors import StorageError
from invformer.runs.run_log import JsonLinesSink
from invformer.training.plots import (
    Branch,
    branches_of,
    draw_bits_per_character,
    draw_inverse,
    draw_lipschitz,
    kept_target,
    plot_run,
    read_curves,
    running_mean,
)

PNG = b"\x89PNG\r\n\x1a\n"
BOUNDS = {
    "token_max": {"attention": 0.69, "feed_forward": 0.69},
    "frobenius": {"attention": 5.6, "feed_forward": 0.69},
}


def write_metrics(path: Path, num_steps: int = 12) -> Path:
    """A small run of two blocks, validated every four steps, with an infinity on the way."""
    sink = JsonLinesSink(path)
    for step in range(num_steps):
        row = {"train/bpc": 3.0 + 2.0 / (step + 1), "lipschitz/target": 0.7}
        for norm, bounds in BOUNDS.items():
            for kind, bound in bounds.items():
                for block in ("block_00", "block_01"):
                    branch = Branch(norm, block, kind)
                    row |= {branch.estimate: 0.1 + 0.01 * step, branch.bound: bound}
        if step % 4 == 3:
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


def test_a_run_leaves_four_pictures(tmp_path: Path) -> None:
    written = plot_run(write_metrics(tmp_path / "metrics.jsonl"), tmp_path)
    assert [path.name for path in written] == [
        "bpc.png",
        "lipschitz_token_max.png",
        "lipschitz_frobenius.png",
        "inverse.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink(0, {"train/bpc": 4.0})
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path) == [tmp_path / "bpc.png"]


def test_a_baseline_without_bounds_has_its_estimates_drawn(tmp_path: Path) -> None:
    branch = Branch("frobenius", "block_00", "attention")
    figure = draw_lipschitz({branch.estimate: ([0, 1], [3.0, 4.0])}, "frobenius")
    assert figure is not None
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[3.0, 4.0]]


def test_axes_are_named_with_their_units(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    figures = [
        draw_bits_per_character(curves),
        draw_lipschitz(curves, "token_max"),
        draw_lipschitz(curves, "frobenius"),
        draw_inverse(curves),
    ]
    assert all(figure is not None for figure in figures)
    axes = [one for figure in figures if figure is not None for one in figure.axes]
    assert all(one.get_ylabel() for one in axes)
    bottoms = [figure.axes[-1].get_xlabel() for figure in figures if figure is not None]
    assert bottoms == ["optimiser step"] * 4
    assert axes[0].get_ylabel() == "bits per character"
    assert "token_max" in axes[1].get_ylabel()
    assert "frobenius" in axes[2].get_ylabel()


def test_the_target_stands_only_in_the_norm_it_was_set_in(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    targets = {}
    for norm, bounds in BOUNDS.items():
        targets[norm] = kept_target(curves, [[bound] for bound in bounds.values()])
        figure = draw_lipschitz(curves, norm)
        assert figure is not None
        labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert ("target 0.7" in labels) == (targets[norm] is not None)
    assert targets == {"token_max": 0.7, "frobenius": None}


def test_attention_is_solid_and_feed_forward_dashed_under_its_own_bound(tmp_path: Path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    figure = draw_lipschitz(curves, "frobenius")
    assert figure is not None
    heights = {
        style: {
            line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == style
        }
        for style in ("-", "--")
    }
    assert heights == {"-": {0.1, 5.6}, "--": {0.1, 0.69}}


def test_blocks_differ_in_greyscale_and_in_their_markers(tmp_path: Path) -> None:
    curves = {
        Branch("token_max", f"block_{i:02d}", "attention").estimate: ([0, 1], [0.1, 0.2])
        for i in range(4)
    }
    figure = draw_lipschitz(curves, "token_max")
    assert figure is not None
    lines = figure.axes[0].lines
    assert len({line.get_marker() for line in lines}) == 4
    grey = [
        sum(w * c for w, c in zip((0.2, 0.7, 0.1), line.get_color(), strict=False))
        for line in lines
    ]
    steps = [later - earlier for earlier, later in itertools.pairwise(grey)]
    assert min(steps) > 0.1


@pytest.mark.parametrize("num_blocks", [8, 9, 64])
def test_the_key_of_many_blocks_names_a_few_and_leaves_the_axes_their_room(
    num_blocks: int,
) -> None:
    curves = {}
    for block in range(num_blocks):
        branch = Branch("token_max", f"block_{block:02d}", "attention")
        curves |= {branch.estimate: ([0, 1], [0.1, 0.2]), branch.bound: ([0, 1], [0.5, 0.5])}
    figure = draw_lipschitz(curves, "token_max")
    assert figure is not None
    (axes,) = figure.axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    blocks = [name for name in names if name.startswith("block")]
    assert len(blocks) == 8
    assert (blocks[0], blocks[-1]) == ("block 00", f"block {num_blocks - 1:02d}")
    figure.draw_without_rendering()
    assert axes.get_window_extent().height > 0.7 * figure.bbox.height


def test_branches_are_found_by_norm_and_not_by_summaries() -> None:
    curves = {
        "lipschitz/token_max/block_01/attention/estimate": ([0], [1.0]),
        "lipschitz/frobenius/block_00/feed_forward/estimate": ([0], [1.0]),
        "lipschitz/token_max/estimate_max": ([0], [1.0]),
    }
    assert branches_of(curves, "token_max") == [Branch("token_max", "block_01", "attention")]


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
