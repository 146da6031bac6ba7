"""How throughput falls with the length of the context and with depth."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

STYLES = {
    "contractive_l2": "-",
    "contractive_bounded": (0, (6, 1)),
    "l2": "--",
    "dot_product": ":",
    "plain": "-.",
}


def plot_growth(report: dict[str, Any], out: Path) -> Iterator[Path]:
    """One PNG beside the results for what varies; nothing without matplotlib.

    Yields:
        The files that were written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    for key, label in (("seq_len", "context, characters"), ("num_layers", "blocks")):
        for device in sorted({row["device"] for row in report["rows"]}):
            curves = growth(report["rows"], key, device)
            if max((len(points) for points in curves.values()), default=0) < 2:
                continue
            figure = Figure(figsize=(5, 3.5), layout="constrained")
            axes = figure.subplots()
            for model, points in curves.items():
                sizes, rates = zip(*sorted(points), strict=True)
                axes.plot(
                    sizes,
                    rates,
                    color="k",
                    linestyle=STYLES[model],
                    marker="o",
                    markersize=3,
                    label=model,
                )
            axes.set(xlabel=label, ylabel="training, characters/s", yscale="log")
            axes.set_xscale("log", base=2)
            axes.legend(frameon=False)
            path = out.with_name(f"{out.stem}_{device}_{key}.png")
            figure.savefig(path, dpi=150)
            yield path


def growth(rows: list[dict[str, Any]], key: str, device: str) -> dict[str, list[tuple]]:
    """Per model (size, characters/s) of the training rows that differ in ``key`` alone.

    Of several batches at one size the smallest counts, which has the usual number of characters.
    """
    others = [name for name in ("seq_len", "d_model", "num_layers") if name != key]
    training = [
        row for row in rows
        if row["task"] == "train" and row["device"] == device and row["variant"] in STYLES
    ]  # fmt: skip
    found: dict[tuple, dict[str, dict[int, float]]] = {}
    for row in sorted(training, key=lambda row: row["batch_size"]):
        held = found.setdefault(tuple(row[name] for name in others), {})
        held.setdefault(row["variant"], {}).setdefault(row[key], row["characters_per_second"][0])
    curves = max(found.values(), key=lambda curves: max(map(len, curves.values())), default={})
    return {variant: sorted(points.items()) for variant, points in curves.items()}
