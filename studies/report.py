"""What studies share after their measurements: groups of rows, tables, curves and verdicts.

A row is a case and its result. ``name`` is that of a field or property of either, or a function of
both.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from invformer.report.plots import empty_figure
from studies.rows import AnyCase, AnyResult

if TYPE_CHECKING:  # matplotlib is slow to load
    from invformer.report.plots import Axes, Figure
else:
    Axes = Figure = Any

Outcome = Literal["reproduced", "partly reproduced", "not reproduced", "not in the paper"]
Finding = tuple[bool | None, str]  # whether a claim holds (None: there is no claim), in words
SAID = {True: "holds:  ", False: "fails:  ", None: "found:  "}
Rows = Sequence[tuple[AnyCase, AnyResult]]
Name = str | Callable[[Any, Any], Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Summary:
    """What a study found, in a table and in words, and what that says about the claims.

    If one of ``must`` fails, a bound or the code is wrong, or a claim is refuted: then nothing is
    reproduced. Otherwise all claims of the findings hold, or some, or none; without a claim there
    is nothing to reproduce.
    """

    table: list[dict[str, Any]]
    findings: Sequence[Finding] = ()
    must: Sequence[Finding] = ()

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        held = [holds for holds, _ in self.findings if holds is not None]
        if not all(holds for holds, _ in self.must) or (held and not any(held)):
            return "not reproduced"
        if not held:
            return "not in the paper"
        return "reproduced" if all(held) else "partly reproduced"

    def __str__(self) -> str:
        columns = list(dict.fromkeys(key for line in self.table for key in line))
        lines = [columns, *([as_cell(line.get(name)) for name in columns] for line in self.table)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        findings = dict.fromkeys([*self.must, *self.findings])
        said = [f"{SAID[holds]} {words}" for holds, words in findings]
        return "\n".join([*shown, *said, f"verdict: {self.outcome}"])


def of(row: tuple[Any, Any], name: Name) -> Any:
    """A value of a row."""
    if callable(name):
        return name(*row)
    return getattr(row[0] if hasattr(row[0], name) else row[1], name)


def values(rows: Iterable[tuple[Any, Any]], name: Name) -> list[Any]:
    """A value of every row."""
    return [of(row, name) for row in rows]


def mean(rows: Iterable[tuple[Any, Any]], name: Name) -> float:
    """The mean of a value over rows."""
    return fmean(values(rows, name))


def by(
    rows: Iterable[tuple[AnyCase, AnyResult]], *names: Name
) -> dict[Any, list[tuple[AnyCase, AnyResult]]]:
    """The rows by a value, or by a tuple of several, in the order of their first appearance."""
    groups = alike(rows, names)
    return {key[0]: group for key, group in groups.items()} if len(names) == 1 else groups


def alike(rows: Iterable[Any], names: Sequence[Name]) -> dict[tuple[Any, ...], list[Any]]:
    """The rows by a tuple of any number of values."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(of(row, name) for name in names), []).append(row)
    return found


def differing(cases: Iterable[Any]) -> list[str]:
    """The fields in which cases differ."""
    first, *others = map(vars, cases)
    return [name for name in first if any(one[name] != first[name] for one in others)]


def table(
    rows: Rows[Any, Any],
    names: Sequence[str] | None = None,
    more: Mapping[str, Name] | None = None,
    without: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """A line for each value of some fields, or for each case.

    A line has these fields, then those of the results and ``more``, the mean where rows differ.
    Lists and dicts are left out.
    """
    names = differing(case for case, _ in rows) if names is None else names
    fields = {name: name for name in vars(rows[0][1]) if name not in without}
    lines = []
    for group in alike(rows, names).values():
        line = {name.replace("_", " "): of(group[0], name) for name in names}
        for name, field in {**fields, **(more or {})}.items():
            found = values(group, field)
            if not isinstance(found[0], list | dict):
                line[name.replace("_", " ")] = combined(found)
        lines.append(line)
    return lines


def combined(found: Sequence[Any]) -> Any:
    """The mean; what is the same in all rows as it is; None if one of them is None."""
    if all(value == found[0] for value in found):
        return found[0]
    return None if None in found else fmean(found)


def as_cell(value: Any) -> str:
    """A table's value: five digits of a number, a dash for what does not exist."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def panels(num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, row by row.

    Greys, line styles and markers tell curves apart, never colours; every axis says its unit.
    """
    figure = empty_figure(1 + 6 * num_columns, 1 + 4 * num_rows)
    axes = [one for row in figure.subplots(num_rows, num_columns, squeeze=False) for one in row]
    for one in axes:
        one.grid(color="0.9")
    return figure, axes


def curves(
    axes: Axes, rows: Rows[Any, Any], x: Name, y: Name, group: Sequence[Name] = (), **style: Any
) -> None:
    """A curve for each value of some fields, which label it: the mean of y against x.

    Curves of which a value is None are left out.
    """
    for index, (key, part) in enumerate(alike(rows, group).items()):
        points = sorted(by(part, x).items())
        if None in values(part, y):
            continue
        look = {"label": ", ".join(map(str, key)), **look_of(index), **style}
        axes.plot([at for at, _ in points], [mean(some, y) for _, some in points], **look)


def look_of(index: int) -> dict[str, Any]:
    """Grey, marker and line of a curve."""
    return {
        "color": str(0.12 * (index % 6)), "marker": "os^vDPX<>*"[index % 10],
        "linestyle": ("-", "--", "-.", ":")[index % 4], "fillstyle": "none",
    }  # fmt: skip


def finished(figure: Figure) -> Figure:
    """The figure, with a legend in all axes that have labels and none yet.

    If a logarithmic x axis has few values, and round ones, its ticks are there.
    """
    for axes in figure.axes:
        lines: Any = [line for line in axes.lines if line.get_transform() == axes.transData]
        at = sorted({float(x) for line in lines for x in line.get_xdata()})
        are_round = all(x == float(f"{x:.4g}") for x in at)
        if axes.get_xscale() == "log" and 0 < len(at) < 9 and are_round:
            axes.set_xticks(at, [f"{x:,g}" for x in at])
            axes.set_xticks([], minor=True)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None and not figure.legends:
            axes.legend(fontsize="small")
    return figure
