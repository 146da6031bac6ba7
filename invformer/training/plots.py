"""Pictures of a run, drawn from its metrics.jsonl; readable in greyscale."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invformer.runs.files import replace_file
from invformer.runs.run_log import read_rows

if TYPE_CHECKING:  # matplotlib takes most of a second: imported when there is something to draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Series = tuple[list[int], list[float]]

ESTIMATE = re.compile(r"lipschitz/(?P<norm>\w+)/(?P<block>\w+)/(?P<kind>\w+)/estimate")
MARKERS = "osD^vP*Xp<>h"
# Blocks the legend names: with more it would be taller than the picture.
MOST_NAMED = 8
BOUND_STYLE = {"color": "0.6", "linewidth": 2.2}
SMOOTHED_SHARE = 0.02  # of the run: what the mean of a noisy curve looks back over
STEP_AXIS = "optimiser step"


@dataclass(frozen=True)
class Branch:
    """A residual branch in one norm, with the metrics that belong to it."""

    norm: str
    block: str
    kind: str

    @property
    def estimate(self) -> str:
        """Key of the estimated local constant."""
        return f"lipschitz/{self.norm}/{self.block}/{self.kind}/estimate"

    @property
    def bound(self) -> str:
        """Key of what the normalisation gives in the same norm."""
        return f"lipschitz/{self.norm}/{self.block}/{self.kind}/bound"


def plot_run(metrics: Path, folder: Path) -> list[Path]:
    """Draw what a run recorded: likelihood, Lipschitz constants in each norm, inversion.

    Args:
        metrics: the run's metrics.jsonl.
        folder: where the PNG files go.

    Returns:
        The files written; a picture without data is left out.

    Raises:
        StorageError: a file cannot be written.
    """
    curves = read_curves(metrics)
    figures = {
        "bpc": draw_bits_per_character(curves),
        "lipschitz_token_max": draw_lipschitz(curves, "token_max"),
        "lipschitz_frobenius": draw_lipschitz(curves, "frobenius"),
        "lipschitz_own_token": draw_lipschitz(curves, "own_token"),
        "inverse": draw_inverse(curves),
    }
    return [
        save(figure, folder / f"{name}.png")
        for name, figure in figures.items()
        if figure is not None
    ]


def read_curves(metrics: Path) -> dict[str, Series]:
    """Every metric as (steps, values), in the order of the steps; NaN for what is not finite."""
    curves: dict[str, Series] = {}
    for row in read_rows(metrics):
        for key, value in row.items():
            if key != "step":
                steps, values = curves.setdefault(key, ([], []))
                steps.append(row["step"])
                number = float(value)
                values.append(number if math.isfinite(number) else math.nan)
    return curves


def draw_bits_per_character(curves: Mapping[str, Series]) -> "Figure | None":
    """Training (raw and smoothed) and validation bits per character."""
    if not {"train/bpc", "val/bpc"} & curves.keys():
        return None
    figure, (axes,) = new_figure(1)
    if "train/bpc" in curves:
        steps, values = curves["train/bpc"]
        window = max(1, round(SMOOTHED_SHARE * len(values)))
        axes.plot(steps, values, color="0.8", linewidth=0.7, label="train, each step")
        mean = f"train, mean of {window} steps"
        axes.plot(steps, running_mean(values, window), color="0.45", label=mean)
    if "val/bpc" in curves:
        style: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 4}
        axes.plot(*curves["val/bpc"], label="validation, whole split", **style)
    axes.set(xlabel=STEP_AXIS, ylabel="bits per character")
    axes.legend()
    return figure


def draw_lipschitz(curves: Mapping[str, Series], norm: str) -> "Figure | None":
    """Estimated local constants of every branch under their bounds, all in one norm.

    The target is drawn in the norm in which the bounds keep it, and in no other.
    """
    branches = branches_of(curves, norm)
    if not branches:
        return None
    figure, (axes,) = new_figure(1)
    bounds = {branch: curves[branch.bound] for branch in branches if branch.bound in curves}
    for branch, (steps, values) in bounds.items():
        axes.plot(steps, positive(values), **BOUND_STYLE, **kind_style(branch.kind))
    blocks = sorted({branch.block for branch in branches})
    for branch in branches:
        steps, values = curves[branch.estimate]
        style = block_style(blocks.index(branch.block), len(blocks), len(steps))
        axes.plot(steps, positive(values), linewidth=1.1, **style, **kind_style(branch.kind))
    target = kept_target(curves, [values for _, values in bounds.values()])
    if target is not None:
        axes.axhline(target, color="black", linestyle=":")
    key = lipschitz_key(blocks, branches, list(bounds), target)
    axes.legend(handles=key, loc="center left", bbox_to_anchor=(1.01, 0.5))
    what = "largest diagonal block" if norm == "own_token" else f"{norm} norm"
    ylabel = f"local Lipschitz constant, {what} (no unit)"
    axes.set(xlabel=STEP_AXIS, ylabel=ylabel, yscale="log")
    return figure


def lipschitz_key(
    blocks: Sequence[str],
    branches: Sequence[Branch],
    bounded: Sequence[Branch],
    target: float | None,
) -> "list[Line2D]":
    """The legend: blocks by shade and marker, kinds of branch by line style."""
    from matplotlib.lines import Line2D

    def entry(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label.replace("feed_forward", "feed-forward"), **style)

    key = [
        entry(blocks[index].replace("_", " "), **block_style(index, len(blocks), 1))
        for index in evenly(len(blocks), MOST_NAMED)
    ]
    for kind in sorted({branch.kind for branch in branches}):
        key.append(entry(f"{kind}, estimate", color="0.2", **kind_style(kind)))
    for kind in sorted({branch.kind for branch in bounded}):
        key.append(entry(f"{kind}, bound", **BOUND_STYLE, **kind_style(kind)))
    if target is not None:
        key.append(entry(f"target {target:g}", color="black", linestyle=":"))
    return key


def evenly(count: int, most: int) -> list[int]:
    """The numbers below ``count``, or as many of them, first and last included, as are allowed."""
    if count <= most:
        return list(range(count))
    return [round(k * (count - 1) / (most - 1)) for k in range(most)]


def kind_style(kind: str) -> dict[str, Any]:
    """Attention solid, feed-forward dashed."""
    return {"linestyle": {"attention": "-", "feed_forward": "--"}.get(kind, "-.")}


def block_style(index: int, num_blocks: int, num_points: int) -> dict[str, Any]:
    """A shade and a few markers; viridis gets lighter all the way, so greys stay apart too."""
    from matplotlib import colormaps

    spacing = max(1, num_points // 8)
    return {
        "color": colormaps["viridis"](0.85 * index / max(1, num_blocks - 1)),
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "markevery": (index * spacing // num_blocks, spacing),
    }


def draw_inverse(curves: Mapping[str, Series]) -> "Figure | None":
    """How well and how fast the stack was inverted at each validation."""
    if not any(key.startswith("inverse/") for key in curves):
        return None
    figure, (error, effort, recovered) = new_figure(3)
    lines = (
        (error, "residual_max", "residual", "-", "o"),
        (error, "reconstruction_max", "reconstruction error", "--", "s"),
        (error, "error_bound_max", "proven error bound", ":", "^"),
        (effort, "num_steps_mean", None, "-", "o"),
        (recovered, "characters_recovered", "characters recovered", "-", "o"),
        (recovered, "converged_fraction", "iterations converged", "--", "s"),
    )
    for axes, name, label, style, marker in lines:
        if f"inverse/{name}" in curves:
            steps, values = curves[f"inverse/{name}"]
            shown = positive(values) if axes is error else values
            axes.plot(
                steps, shown, style, color="black", marker=marker, fillstyle="none", label=label
            )
    error.set(ylabel="distance, worst of the sequences\n(norm of the certificate)", yscale="log")
    effort.set(ylabel="solver steps per layer, mean")
    effort.set_ylim(bottom=0)
    recovered.set(ylabel="share", ylim=(-0.05, 1.05), xlabel=STEP_AXIS)
    for axes in (error, recovered):
        if axes.lines:
            axes.legend()
    return figure


def branches_of(curves: Mapping[str, Series], norm: str) -> list[Branch]:
    """Every branch with an estimate in a norm."""
    matches = (ESTIMATE.fullmatch(key) for key in curves)
    return [Branch(**match.groupdict()) for match in matches if match and match["norm"] == norm]


def kept_target(curves: Mapping[str, Series], bounds: Sequence[Sequence[float]]) -> float | None:
    """The target, if every bound is at or below it: then this is the norm it was set in."""
    if not bounds or "lipschitz/target" not in curves:
        return None
    target = curves["lipschitz/target"][1][-1]
    return target if all(bound <= target for values in bounds for bound in values) else None


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the finite ones among the last ``window`` values; NaN where there are none."""
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(math.isfinite(value) for value in values)]
    spans = [(max(0, end - window), end) for end in range(1, len(values) + 1)]
    return [
        (sums[end] - sums[start]) / (counts[end] - counts[start])
        if counts[end] > counts[start]
        else math.nan
        for start, end in spans
    ]


def positive(values: Sequence[float]) -> list[float]:
    """The same values with NaN, a gap in the line, where a logarithmic axis has no place."""
    return [value if value > 0 else math.nan for value in values]


def new_figure(num_rows: int) -> "tuple[Figure, list[Axes]]":
    """A figure of stacked axes that belongs to nobody's global state and needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 + 2.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(num_rows, sharex=True, squeeze=False)[:, 0])
    for one in axes:
        one.grid(color="0.9")
    return figure, axes


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    replace_file(path, image.getvalue())
    return path
