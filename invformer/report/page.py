"""An evaluation as one HTML file: pictures inside, no script, nothing from elsewhere."""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from invformer.evaluation.marked_text import MarkedText
from invformer.evaluation.result import Evaluation
from invformer.processes.console import printable
from invformer.report import plots
from invformer.report.table import (
    DIFFERING,
    branch_cells,
    branch_constants,
    certificate_sentences,
    certified_first,
    comparison,
    details,
    headlines,
    name_of_norm,
    names_of,
    texts_differ,
    title_of_report,
    worst_constants,
)
from invformer.runs.checkpoint import EVALUATION
from invformer.runs.files import refuse_link, replace_file, write_json
from invformer.runs.run_directory import METRICS

if TYPE_CHECKING:
    from invformer.report.plots import Figure

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; }
h1, p, td + td { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
img { max-width: 100%; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .94rem;
        margin: 1rem 0; }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { font: 14px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      background: #f6f6f6; padding: .8rem; margin: .3rem 0; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
       gap: 1rem; }
.proven { background: #d5efd5; } .wrong { background: #f7c4c4; } .open { background: #ececec; }
</style>
"""
CLASSES = {"✓": "proven", "·": "open", "✗": "wrong"}
Row = Sequence[str]


def page(report: Evaluation, curves: Mapping[str, plots.Series]) -> str:
    """The page of one evaluation; without a run there are no curves."""
    data, (name,) = report.data, names_of([report])
    constants = {plots.short(name): row for name, row in branch_constants(report).items()}
    parts = [
        table(headlines(report)),
        picture(
            plots.draw_summary(
                curves, constants, ngram=ngram_of_run(report), title=title_of_report(report)
            ),
            "Bits per character; constants of every branch",
        ),
        "<p>Curves belong to the training, whose estimates and local bounds are at a short probe "
        "text. Bars and table belong to this evaluation, with a tighter local bound.",
        "<h2>What is proven</h2>",
        *(f"<p>{shown(sentence)}" for sentence in certificate_sentences(report.certificate)),
        *(
            table(
                branch_cells(rows),
                (name_of_norm(norm, report.certificate), "estimate ≤", "local bound ≤", "bound"),
            )
            for norm, rows in certified_first(report)[:1]
        ),
    ]
    if report.inversion is not None:
        parts += [
            "<h2>The text that comes back</h2>",
            "<p>Left is the text. Right is what was recovered from the states at the top of the "
            "network alone: <span class=proven>proven</span>, <span class=open>not proven</span>, "
            "<span class=wrong>wrong</span>. A character is proven if the states of every text "
            "that differs in it, or earlier, are farther from the given ones than its own.</p>",
            *map(marked_text, report.inversion.texts),
        ]
    parts += [
        "<h2>A sample</h2>",
        f"<pre><b>{shown(report.sample.prompt)}</b>{shown(report.sample.text)}</pre>",
        "<h2>How it was made</h2>",
        table(provenance(report)),
        "<h2>All numbers</h2>",
        table(details(report)),
    ]
    return document(f"{name}, step {report.step}, on {data.name}, {data.split}", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    head = f"<title>{shown(title)}</title>\n<h1>{shown(title)}</h1>"
    return HEAD + "\n".join([head, *parts]) + "\n</html>\n"


def keep(report: Evaluation, latest: Path) -> tuple[Path, Path]:
    """Write a report and its page to files for its data set, split and step.

    No other text overwrites them. They are in a folder ``evaluation`` beside ``latest``, the run's
    ``evaluation.json``. If the text is the model's own, ``latest`` and ``report.html`` become
    copies, and after the validation split ``summary.png`` is drawn again with the n-gram.
    Returns the report's file, and the page that a reader should open.
    """
    data, curves = report.data, {}
    name = re.sub(r"[^A-Za-z0-9_]+", "-", data.name)
    if not data.same_as_training:
        name += f"-{data.sha256[:8]}"
    path = latest.with_suffix("") / f"{name}-{data.split}-{report.step}.json"
    refuse_link(path.parent)
    write_json(report.to_json(), path)
    if data.same_as_training:
        write_json(report.to_json(), latest)
    if latest.name == EVALUATION:
        with suppress(OSError):  # a model without its run
            curves = plots.read_curves(latest.with_name(METRICS))
    content, html = page(report, curves), path.with_suffix(".html")
    replace_file(html, content)
    if data.same_as_training:
        html = latest.with_name(latest.name.replace("evaluation.json", "report.html"))
        replace_file(html, content)
        if curves and data.split == "val":
            sample, summary = report.sample, latest.with_name("summary.png")
            words, title = sample.prompt + sample.text, title_of_report(report)
            plots.plot_run(curves, summary, words, ngram_of_run(report), title)
    return path, html


def keep_comparison(reports: Sequence[Evaluation], folder: Path) -> Path:
    """Write a page into a folder: several evaluations in one table and one figure.

    Other models, steps or texts have another page.
    """
    header, *rows = comparison(reports)
    names = names_of(reports)
    texts = [(r.data.name, r.data.split, r.data.sha256[:8]) for r in reports]
    commands = [(name, r.command or "–") for name, r in zip(names, reports, strict=True)]
    differ = texts_differ(reports)
    figure = "" if differ else picture(draw_comparison(reports), "Bits per character, constants")
    parts = [
        f"<p>On {shown('; '.join(' '.join(text) for text in sorted(set(texts))))}.",
        f"<p><b>{DIFFERING[0].upper()}{DIFFERING[1:]}.</b>" if differ else "",
        table(rows, header),
        figure,
        "<h2>How they were trained</h2>",
        table(commands),
    ]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", name) for name in names)[:100]
    models = [(report.checkpoint, report.step) for report in reports]
    digest = hashlib.sha256(repr((models, texts)).encode()).hexdigest()[:8]
    path = folder / f"comparison-{name}-{digest}.html"
    replace_file(path, document(" beside ".join(names), parts))
    return path


def draw_comparison(reports: Sequence[Evaluation]) -> "Figure":
    """Bits per character, and the largest constants of any branch, of several models."""
    names = names_of(reports)
    figure = plots.empty_figure(11, 3.6)
    likelihood, constants = figure.subplots(1, 2)
    places = range(len(reports))
    for values, marker, label in (
        ([report.bpc for report in reports], "o", "model"),
        ([r.ngram.bpc if r.ngram else math.nan for r in reports], "_", "5-gram"),
    ):
        likelihood.plot(places, values, marker, color="black", markersize=9, label=label)
    likelihood.set_xticks(places, names, size=8)
    likelihood.set(ylabel="bits per character", xlim=(-0.5, len(reports) - 0.5))
    likelihood.margins(y=0.2)
    likelihood.legend()
    worst = dict(zip(names, map(worst_constants, reports), strict=True))
    plots.draw_constants(constants, worst)
    constants.set(ylabel="largest constant of any branch")
    known = [value for row in worst.values() for value in row.values() if value]
    if known and max(known) > 10 * min(known):
        constants.set(yscale="log", ylim=(min(known) / 4, 2 * max(known)))
    return figure


def shown(value: object) -> str:
    """A value as HTML text; control characters are shown, not sent."""
    return escape(printable(str(value)))


def table(rows: Iterable[Row], header: Row = ()) -> str:
    """Names on the left, values beside them; under a header values are numbers."""
    style = " class=number" if header else ""
    lines = ["<tr>" + "".join(f"<th>{shown(cell)}" for cell in header)] if header else []
    for name, *values in rows:
        lines.append(f"<tr><td>{shown(name)}" + "".join(f"<td{style}>{shown(v)}" for v in values))
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def marked_text(one: MarkedText) -> str:
    """A text, and the recovered one with every character marked."""
    coloured = "".join(
        f"<span class={CLASSES[mark]}>{shown(''.join(c for _, c in run))}</span>"
        for mark, run in groupby(zip(one.marks, one.recovered, strict=True), key=itemgetter(0))
    )
    return f"<div class=two><pre>\n{shown(one.text)}</pre><pre>\n{coloured}</pre></div>"


def provenance(report: Evaluation) -> list[Row]:
    """Model, commands, commit and text."""
    model, data = report.model, report.data
    rows = [
        ("model", f"{model.name}, {model.parameters:,} parameters, step {report.step}"),
        ("trained with", report.command),
        ("evaluated with", report.evaluated_with),
        ("commit", report.commit),
        ("text", f"{data.source}, SHA-256 {data.sha256}"),
    ]
    return [(name, value) for name, value in rows if value]


def ngram_of_run(report: Evaluation) -> float | None:
    """Bits per character of the n-gram on the run's own validation split."""
    own = report.data.same_as_training and report.data.split == "val"
    return report.ngram.bpc if own and report.ngram else None


def picture(figure: "Figure", what: str) -> str:
    """A figure as part of the page."""
    content = base64.b64encode(plots.as_png(figure)).decode()
    return f'<p><img alt="{shown(what)}" src="data:image/png;base64,{content}"></p>'
