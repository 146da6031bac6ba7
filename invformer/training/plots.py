"""Pictures of a run, drawn from its metrics.jsonl; readable in greyscale."""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invformer.runs.files import replace_file
from invformer.runs.run_log import read_rows

if TYPE_CHECKING:  # matplotlib takes most of a second: imported when there is something to draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = tuple[list[int], list[float]]

PREFIX, SUFFIX = "lipschitz_branches/", "/estimate"
SMOOTHED_SHARE = 0.02  # of the run: what the mean of a noisy curve looks back over
STEP_AXIS = "optimiser step"


def plot_run(metrics: Path, folder: Path) -> list[Path]:
    """Draw what a run recorded: likelihood, Lipschitz constants, inversion.

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
        "lipschitz": draw_lipschitz(curves),
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


def draw_lipschitz(curves: Mapping[str, Series]) -> "Figure | None":
    """Estimate, local bound and target of every branch, attention above feed-forward."""
    names = [k.removeprefix(PREFIX).removesuffix(SUFFIX) for k in curves if k.endswith(SUFFIX)]
    names = sorted(name for name in names if PREFIX + name + SUFFIX in curves)
    kinds = sorted({name.partition("/")[2] for name in names})
    if not kinds:
        return None
    from matplotlib import colormaps

    figure, rows = new_figure(len(kinds))
    for axes, kind in zip(rows, kinds, strict=True):
        blocks = [name for name in names if name.partition("/")[2] == kind]
        for index, name in enumerate(blocks):
            # viridis gets lighter all the way, so that greys stay apart too
            color = colormaps["viridis"](0.85 * index / max(1, len(blocks) - 1))
            steps, values = curves[f"{PREFIX}{name}/estimate"]
            ends = index in (0, len(blocks) - 1)
            label = f"{name.partition('/')[0].replace('_', ' ')}, estimate" if ends else None
            axes.plot(steps, positive(values), color=color, linewidth=1.1, label=label)
            if f"{PREFIX}{name}/local_bound" in curves:
                steps, values = curves[f"{PREFIX}{name}/local_bound"]
                axes.plot(
                    steps, positive(values), "^", color=color, fillstyle="none",
                    label="local bounds" if index == 0 else None,
                )  # fmt: skip
        if "lipschitz/target" in curves:
            target = curves["lipschitz/target"][1][-1]
            axes.axhline(target, color="black", linestyle=":", label=f"target {target:g}")
        name = kind.replace("feed_forward", "feed-forward")
        axes.set(ylabel=f"{name}: local Lipschitz\nconstant (no unit)", yscale="log")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    rows[-1].set(xlabel=STEP_AXIS)
    return figure


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
