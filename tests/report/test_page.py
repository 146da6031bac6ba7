"""The page of an evaluation, and the picture of a run: everything is in it."""

import math
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.marked_text import MarkedText, readable
from invformer.evaluation.result import Evaluation, SampledText
from invformer.nn.certificate import Certificate
from invformer.report import table
from invformer.report.page import keep, keep_comparison, page
from invformer.report.plots import constants_of, draw_summary, in_words, plot_run, read_curves
from invformer.report.recovered_text import cell_width, lines_of
from tests.support.processes import python
from tests.support.saved_runs import Saved
from tests.support.small_runs import write_rows


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Evaluation:
    """Of a small model that was not trained."""
    torch.set_default_dtype(torch.float32)
    return Saved(tmp_path_factory.mktemp("run")).evaluated()


class Elements(HTMLParser):
    """The tags of a page, what they refer to, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {k: v or "" for k, v in attrs}
        self.references += [values[k] for k in ("src", "href", "srcset", "data") if k in values]
        assert not [name for name in values if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_everything_and_refers_to_nothing(report) -> None:
    elements = Elements(page(report, {}))
    assert all(r.startswith("data:image/png;base64,") for r in elements.references)
    assert not {"script", "link", "iframe", "object", "base"} & set(elements.tags)
    assert "url(" not in elements.text
    assert report.inversion
    (first, *_) = report.inversion.texts
    for said in (
        "val bpc", "is proven to be at most 0.4", "says nothing about the LayerNorm and head",
        "local bound ≤", first.text, report.sample.text, report.evaluated_with,
        report.data.sha256, "error bound by the rounding model",
    ):  # fmt: skip
        assert said in elements.text
    assert elements.text.count(first.recovered) >= 2


def test_text_of_a_model_is_escaped_in_a_page(report) -> None:
    said = "<script>alert(1)</script>\x1b[31m"
    assert report.inversion
    inversion = replace(report.inversion, texts=[MarkedText(said, said, "✓·✗" * 9 + "✓✓✓")])
    found = page(replace(report, sample=SampledText("<b>", said), inversion=inversion), {})
    assert "<script" not in found
    assert "\x1b" not in found
    assert Elements(found).text.count(r"<script>alert(1)</script>\x1b[31m") == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=dot_product"], "a baseline without a Lipschitz bound"),
        (["model=reversible"], "a baseline without a Lipschitz bound"),
        (["model=causal_bounded"], "diagonal block of the Jacobian of every residual branch is"),
        (["trainer.precision=bf16-mixed"], "weights in bfloat16"),
    ],
    ids=" ".join,
)
def test_every_model_has_a_page_with_or_without_data(words: list[str], says: str, tmp_path) -> None:
    torch.set_default_dtype(torch.float32)
    saved = Saved(tmp_path, *words)
    report = saved.evaluated()
    assert says in Elements(page(report, {})).text
    without = replace(report, local_lipschitz={}, inversion=None)
    text = Elements(page(without, {})).text
    assert says in text
    assert "The text that comes back" not in text
    assert len(table.comparison([report, without])) == 3


def test_only_an_evaluation_of_its_own_text_replaces_a_page(report, tmp_path) -> None:
    write_metrics(tmp_path / "metrics.jsonl")
    latest = tmp_path / "evaluation.json"
    assert keep(report, latest)[1] == tmp_path / "report.html"
    own = (tmp_path / "report.html").read_bytes()
    assert (tmp_path / "evaluation/text_file-val-3.html").read_bytes() == own
    assert (tmp_path / "summary.png").is_file()
    other = replace(report, data=replace(report.data, same_as_training=False))
    _, path = keep(other, latest)
    assert path.parent == tmp_path / "evaluation"
    assert "another text" in path.read_text()
    assert (tmp_path / "report.html").read_bytes() == own


def test_several_models_share_a_table_and_a_figure(report, tmp_path, capsys) -> None:
    nothing = {"certificate": None, "inversion": None, "ngram": None, "local_lipschitz": {}}
    path = "runs/plain/checkpoints/step-00000003"
    baseline = replace(report, checkpoint=path, bpc=9.5, **nothing)
    reports = [report, baseline]
    header, own, other = table.comparison(reports)
    assert other == ["plain", "contractive_l2", "3", "9.5000", *"–––––"]
    assert own[header.index("recovered")] == "100.00%"
    assert own[header.index("every branch ≤")].startswith("0.4")
    table.print_comparison(reports)
    assert len({len(line) for line in capsys.readouterr().out.strip("\n").splitlines()}) == 1
    path = keep_comparison(reports, tmp_path)
    assert "-plain-" in path.name
    on_test = [replace(one, data=replace(one.data, split="test")) for one in reports]
    table.print_comparison([report, on_test[1]])
    assert "bits per character do not compare" in capsys.readouterr().out
    assert len({path, keep_comparison(reports, tmp_path), keep_comparison(on_test, tmp_path)}) == 2
    apart = Elements(keep_comparison([report, on_test[1]], tmp_path).read_text(encoding="utf-8"))
    assert "bits per character do not compare" in apart.text
    assert "img" not in apart.tags
    elements = Elements(path.read_text(encoding="utf-8"))
    assert elements.tags.count("img") == 1
    assert elements.tags.count("tr") == 3 + 2
    path = keep_comparison([report, report], tmp_path)  # names that are not unique
    assert path.read_text(encoding="utf-8").count(report.checkpoint) > 2
    keep_comparison([baseline, baseline], tmp_path)  # a figure without constants


def test_margins_that_are_not_finite_prove_nothing(report) -> None:
    assert report.inversion
    inversion = replace(report.inversion, radius=math.nan, distance=math.nan)
    text = Elements(page(replace(report, inversion=inversion), {})).text
    assert "not of every character" in text
    assert "other symbols would" not in text


def test_a_summary_says_what_an_evaluation_found(report) -> None:
    found = table.summary_values(report)
    assert found["evaluation/val_bpc"] == report.bpc
    assert found["evaluation/characters_proven"] == 1
    order = ("estimate", "local_bound", "bound", "target")
    constants = [found[f"evaluation/{key}"] for key in order]
    assert constants == sorted(constants)


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
def test_a_run_of_whatever_length_has_its_picture(tmp_path, row: dict[str, float]) -> None:
    write_rows(tmp_path / "metrics.jsonl", {0: row})
    path = tmp_path / "a.png"
    plot_run(read_curves(tmp_path / "metrics.jsonl"), path, "a sample, 5 $", ngram=None)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_nothing_that_is_drawn_is_clipped(tmp_path) -> None:
    curves = read_curves(write_metrics(tmp_path / "metrics.jsonl"))
    words = in_words(curves, "a sample of 50 characters in a line, and some more " * 40)
    weighted = Certificate(
        "token_max", "global", 0.5, {"a": 0.5}, {"a": 0.4}, {"a": 2.0}, {}, None, "float32", 16
    )
    title = table.title_of("first", "l2", "books", 0.031, weighted)
    shown = "first: l2 on books (3.1% unknown symbols). Lipschitz constants in weighted token_max"
    assert title == shown
    last = constants_of({key: values[-1] for key, (_, values) in curves.items()})
    figure = draw_summary(curves, last, words, 1.5, title)
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


def test_values_json_has_no_number_for_become_gaps(tmp_path) -> None:
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
def test_marks_stand_below_symbols(text: str, recovered: str, marks: str, rows: list[str]) -> None:
    assert list(lines_of(text, recovered, marks)) == [(len(text), rows)]


@pytest.mark.parametrize("character", ["a", "好", "e\u0301"])
def test_lines_break_at_the_cells_of_a_terminal_and_lose_nothing(character: str) -> None:
    text = character * 100
    found = list(lines_of(text, text, "✓" * len(text)))
    assert "".join(rows[0] for _, rows in found) == text
    assert all(cell_width(row) <= 72 for _, rows in found for row in rows)
    assert found[-1][0] == len(text)
    assert cell_width(found[0][1][0]) == 72
