"""The picture of a run, drawn from its metrics.jsonl; readable in greyscale."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from invformer.runs.files import replace_file
from invformer.runs.run_log import by_branch, read_rows

if TYPE_CHECKING:  # matplotlib takes most of a second: imported when there is something to draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

Series = tuple[list[int], list[float]]
Constants = Mapping[str, float | None]

SMOOTHED_SHARE = 0.02  # of the run: the mean of a noisy curve is over this share of its steps
BARS = {"estimate": "0.2", "local_bound": "0.5", "bound": "0.8", "target": "white"}
LEGEND = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 4,
    "fontsize": 8,
    "frameon": False,
}


def plot_run(
    curves: Mapping[str, Series], path: Path, sample: str, ngram: float | None, title: str = ""
) -> None:
    """Write :func:`draw_summary` of a run as PNG."""
    constants = constants_of({key: values[-1] for key, (_, values) in curves.items()})
    save(draw_summary(curves, constants, in_words(curves, sample), ngram, title), path)


def read_curves(metrics: Path) -> dict[str, Series]:
    """Every metric as (steps, values), in the order of the steps; NaN for what is not finite."""
    curves: dict[str, Series] = {}
    for row in read_rows(metrics):
        step = row.pop("step")
        for key, value in row.items():
            steps, values = curves.setdefault(key, ([], []))
            steps.append(step)
            values.append(float(value) if math.isfinite(float(value)) else math.nan)
    return curves


def draw_summary(
    curves: Mapping[str, Series],
    constants: Mapping[str, Constants],
    words: str = "",
    ngram: float | None = None,
    title: str = "",
) -> "Figure":
    """Bits per character and course of the constants, if there are curves; constants; words.

    ``ngram`` is what a 5-gram has on the validation split, in bits per character; ``title`` says
    which run, text and norm.
    """
    rows: list[Any] = [["likelihood", "course"]] if curves else []
    rows.append(["constants", "words" if words else "constants"])
    figure = empty_figure(11, 3.5 * len(rows))
    figure.suptitle(title.replace("$", r"\$"), size=10)
    axes = figure.subplot_mosaic(rows)
    if curves:
        draw_bits_per_character(axes["likelihood"], curves, ngram)
        draw_course(axes["course"], curves)
    draw_constants(axes["constants"], constants)
    if words:
        axes["words"].axis("off")
        axes["words"].text(0, 1, words, va="top", family="monospace", size=9)
    return figure


def draw_bits_per_character(
    axes: "Axes", curves: Mapping[str, Series], ngram: float | None = None
) -> None:
    """Training, as a running mean, and validation; the axis leaves out the first tenth's fall."""
    shown: list[float] = []
    if "train/bpc" in curves:
        steps, values = curves["train/bpc"]
        window = max(1, round(SMOOTHED_SHARE * len(values)))
        mean = running_mean(values, window)
        axes.plot(steps, mean, color="0.6", label=f"train, mean of {window} steps")
        shown += mean[len(mean) // 10 :]
    if "val/bpc" in curves:
        steps, values = curves["val/bpc"]
        label = f"validation, whole split: {values[-1]:.3f}"
        axes.plot(steps, values, color="black", marker="o", markersize=4, label=label)
        shown += values
    if ngram is not None:
        axes.axhline(ngram, color="black", linestyle=":", label=f"5-gram: {ngram:.3f}")
        shown.append(ngram)
    shown = [value for value in shown if math.isfinite(value)]  # a run may end with a lost loss
    if shown and max(shown) > min(shown):
        room = 0.1 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - room, max(shown) + room)
    axes.set(xlabel="optimiser step", ylabel="bits per character")
    if axes.lines:
        axes.legend()


def constants_of(row: Mapping[str, float]) -> dict[str, Constants]:
    """Estimate, local bound, bound and target of every branch in a row."""
    branches, target = sorted(by_branch(row).items()), row.get("lipschitz/target")
    return {short(name): {**values, "target": target} for name, values in branches}


def picture_of(row: Mapping[str, float]) -> "Image":
    """:func:`draw_constants` of one row."""
    from PIL import Image

    constants = constants_of(row)
    figure = empty_figure(max(6.0, 1.1 * len(constants)), 3.5)
    draw_constants(figure.subplots(), constants)
    return Image.open(io.BytesIO(as_png(figure)))


def draw_constants(axes: "Axes", constants: Mapping[str, Constants]) -> None:
    """Estimate ≤ local bound ≤ bound ≤ target as bars side by side, for every name.

    The numbers have the keys of :data:`BARS`; None or no key for what is not known.
    """
    width = 0.8 / len(BARS)
    for index, (what, shade) in enumerate(BARS.items()):
        values = enumerate(c.get(what) or 0.0 for c in constants.values())
        found = [(i, value) for i, value in values if value and math.isfinite(value)]
        if found:
            places, heights = zip(*found, strict=True)
            left = [place + (index - 1.5) * width for place in places]
            style = {"color": shade, "edgecolor": "black", "linewidth": 0.6}
            axes.bar(left, heights, width, label=what.replace("_", " "), **style)
    upright = len(constants) > 8
    names = [n if upright else re.sub(" |(?<=-)", "\n", n) for n in constants]
    axes.set_xticks(range(len(names)), names, rotation=90 if upright else 0, size=8)
    axes.set(ylabel="Lipschitz constant of each branch")
    if axes.containers:
        axes.legend(**LEGEND)


def draw_course(axes: "Axes", curves: Mapping[str, Series]) -> None:
    """The worst branch's estimate, local bound, bound and target over the run."""
    for key, style in (("estimate", "-"), ("local_bound", "^"), ("bound", "v"), ("target", ":")):
        if f"lipschitz/{key}" in curves:
            steps, values = curves[f"lipschitz/{key}"]
            axes.plot(steps, values, style, color="black", label=key.replace("_", " "))
    axes.set(xlabel="optimiser step", ylabel="Lipschitz constant, worst branch")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # marks of the bound lie on the target
    if axes.lines:
        axes.legend(**LEGEND)


def in_words(curves: Mapping[str, Series], sample: str) -> str:
    """What inversion achieved at the last validation, and a sample."""
    lines = []
    if "inverse/characters_recovered" in curves:
        last = {key: values[-1] for key, (_, values) in curves.items()}
        lines += [
            "From the top of the network back to the text:",
            f"  characters recovered    {100 * last['inverse/characters_recovered']:.1f} %",
            f"  largest error of x      {last['inverse/reconstruction_max']:.1e}",
            f"  solver steps in a layer {last['inverse/num_steps_mean']:.1f}",
            "",
        ]
    if sample:
        shown = [textwrap.wrap(line, 52) or [""] for line in sample.splitlines()]
        lines += ["A sample:", *(f"  {line}" for part in shown for line in part)][:14]
    return "\n".join(lines).replace("$", r"\$")


def short(name: str) -> str:
    """``0 attention`` for block_00/attention; names of other models stay."""
    match = re.fullmatch(r"block_(\d+)/(\w+)", name)
    return f"{int(match[1])} {match[2].replace('_', '-')}" if match else name


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last ``window`` values, or of as many as there are."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def empty_figure(width: float, height: float) -> "Figure":
    """A figure, in inches, that belongs to nobody's global state and needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def as_png(figure: "Figure") -> bytes:
    """A figure as the content of a PNG file."""
    image = io.BytesIO()
    with warnings.catch_warnings():  # the font draws a box for a symbol that it lacks
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG."""
    replace_file(path, as_png(figure))
