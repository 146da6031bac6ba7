"""What every study is made of, and the runner that makes one restartable, recorded and comparable.

A study is a module of this package. It says what can be asked for, which cases that means, how one
case is measured, and what the rows of all cases say beside the paper:

    @dataclass(kw_only=True)
    class Options(StudyOptions):   # with a docstring: --help prints it
        program: ClassVar[str] = "-m studies.example"
        paper: ClassVar[Mapping[str, Any]] = {"sizes": [100, 1000]}  # what scale=paper changes
        sizes: list[int] = option([100], "numbers of tokens N", within="[2, 1e5]")

    @dataclass(frozen=True)
    class Case:                    # everything the numbers depend on, and nothing else
        num_tokens: int
        seed: int

    @dataclass(frozen=True)
    class Result:                  # what is measured
        lower: float
        curve: list[float]         # a list becomes one cell of the CSV, as JSON

    def cases(options: Options) -> list[Case]: ...
    def measure(case: Case, device: torch.device) -> Result: ...
    def summarise(rows: Rows[Case, Result]) -> Summary: ...
    def draw(rows: Rows[Case, Result]) -> "Figure": ...      # starts from panels(...) below

    STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

    if __name__ == "__main__":
        raise SystemExit(main(STUDY, sys.argv[1:]))

``python -m studies`` finds it by its class ``Options`` and the first line of its
docstring. A row is written as soon as its case is measured; the next start measures only the cases
that have no row yet. A row belongs to a case only if every field of it agrees: after a change of
options new rows join the file and the old ones stay there, unused. Loops of more than ten seconds
inside ``measure`` go through :func:`progress`.
"""

# ruff: noqa: RUF009  # option() returns a dataclass field

import csv
import io
import json
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_origin

import torch
from tqdm import tqdm

from invformer.config import load_config, parse_or_exit
from invformer.config.section import Root, option, options
from invformer.errors import ConfigurationError, StorageError
from invformer.evaluation.report import write_json
from invformer.runs.console import outlive_console
from invformer.runs.exit import guarded, interrupt
from invformer.runs.machine import commit, hardware, pick_device
from invformer.training.plots import new_figure, save

if TYPE_CHECKING:  # matplotlib and wandb are slow to load, and wandb is not always wanted
    from invformer.runs.wandb_sink import WandbSink
    from invformer.training.plots import Axes, Figure

SEED = "[0, 4294967295]"
SCALE_WORD = re.compile(r"(?:--)?scale=(.*)")
LARGEST_CELL = 2**31 - 1  # characters; a reader's own limit, 131,072, is less than is written
NOT_IN_COMMAND = ("scale", "record", "results", "wandb", "project", "debug")  # change no number
EVIDENCE = ("seconds", "hardware", "commit")  # columns of every row beside its case and result
MARKDOWN_COLUMNS = (
    "study", "paper", "ours", "verdict", "command", "commit", "hardware", "time",
)  # fmt: skip

Scale = Literal["default", "paper"]
Outcome = Literal["reproduced", "partly reproduced", "not reproduced", "not in the paper"]
AnyOptions = TypeVar("AnyOptions", bound="StudyOptions")
AnyCase = TypeVar("AnyCase")
AnyResult = TypeVar("AnyResult")
Item = TypeVar("Item")
Rows = Sequence[tuple[AnyCase, AnyResult]]


@dataclass(kw_only=True)
class StudyOptions(Root):
    """What can be set in every study."""

    paper: ClassVar[Mapping[str, Any]] = {}
    scale: Scale = option(
        "default", "paper is the published size; scale=paper --print-config shows what that sets"
    )
    out: str | None = option(None, "folder of the results; null is checkpoints/studies/NAME")
    seed: int = option(0, "of weights, inputs and starts", within=SEED)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes a GPU if there is one")
    num_threads: int | None = option(
        None, "CPU threads; null leaves PyTorch's choice", within="[1, 1024]"
    )
    record: bool = option(False, "also put the study's row into the file named by results")
    results: str = option("docs/results.md", "Markdown file for record=true")
    wandb: bool = option(True, "mirror rows, table and figure to W&B (offline without an API key)")
    project: str = option("invformer", "W&B project")
    debug: bool = option(False, "show tracebacks instead of one-line errors")

    @property
    def name(self) -> str:
        """The study's name."""
        return self.program.rpartition(".")[2]

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(os.path.expanduser(self.out or f"checkpoints/studies/{self.name}"))

    def command(self) -> str:
        """The shortest command line that means these options."""
        scale = [] if self.scale == "default" else [f"scale={self.scale}"]
        reference = load_config([*scale_words(type(self), scale), *scale], type(self))
        changed = [
            f"{key}={as_word(value_at(self, key))}"
            for key, _ in options(type(self))
            if value_at(self, key) != value_at(reference, key) and key not in NOT_IN_COMMAND
        ]
        return shlex.join(["python", *self.program.split(), *scale, *changed])


@dataclass(frozen=True)
class Summary:
    """What a study found.

    Attributes:
        table: lines with the same keys, the paper's value beside ours where there is one.
        paper: what the paper reports, in a few words.
        ours: the same of this run.
        outcome: whether the claim was reproduced.
        why: one honest sentence: what agrees, what does not, and what could not be compared.
    """

    table: list[dict[str, Any]]
    paper: str
    ours: str
    outcome: Outcome
    why: str

    @property
    def verdict(self) -> str:
        """Outcome and reason."""
        return f"{self.outcome}: {self.why}"


@dataclass(frozen=True)
class Study(Generic[AnyOptions, AnyCase, AnyResult]):
    """One published experiment; the module's docstring shows each part."""

    options: type[AnyOptions]
    case: type[AnyCase]
    result: type[AnyResult]
    cases: Callable[[AnyOptions], Iterable[AnyCase]]
    measure: Callable[[AnyCase, torch.device], AnyResult]
    summarise: Callable[[Rows[AnyCase, AnyResult]], Summary]
    draw: "Callable[[Rows[AnyCase, AnyResult]], Figure]"


@dataclass(frozen=True)
class Measured(Generic[AnyResult]):
    """One row of the file: a result and under what circumstances it was obtained."""

    result: AnyResult
    seconds: float
    hardware: str
    commit: str


def main(study: Study[AnyOptions, Any, Any], argv: Sequence[str]) -> int:
    """Parse, run, report; the program's exit code.

    Args:
        study: what to run.
        argv: ``key=value`` words.

    Returns:
        0, or the code of what went wrong: 130 after Ctrl-C, 143 after SIGTERM; every finished case
        is kept.

    Raises:
        SystemExit: 0 after ``--help``, 2 after one line about a bad argument.
    """
    outlive_console()
    chosen = parse_or_exit([*scale_words(study.options, argv), *argv], study.options)
    signal.signal(signal.SIGINT, interrupt)  # Ctrl-C says which cases are kept
    return guarded(lambda: print_summary(run(study, chosen), chosen), debug=chosen.debug)


def scale_words(schema: type[StudyOptions], argv: Sequence[str]) -> list[str]:
    """The settings that ``scale=paper`` stands for; put first, whatever else is set wins."""
    asked = [match[1] for word in argv if (match := SCALE_WORD.fullmatch(word))]
    if asked[-1:] != ["paper"]:
        return []
    return [f"{key}={as_word(value)}" for key, value in schema.paper.items()]


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def run(study: Study[AnyOptions, AnyCase, AnyResult], chosen: AnyOptions) -> Summary:
    """Measure every case without a row, then summarise, draw and record.

    Leaves in the study's folder: rows.csv, NAME.png, result.json and row.md.

    Args:
        study: what to run.
        chosen: its options.

    Returns:
        The summary over exactly the cases that were asked for.

    Raises:
        ConfigurationError: no case is left, or the device does not exist.
        StorageError: the folder cannot be written, or holds the rows of something else.
    """
    if chosen.num_threads is not None:
        torch.set_num_threads(chosen.num_threads)
    device = pick_device(chosen.device, "device")
    wanted = list(dict.fromkeys(study.cases(chosen)))
    if not wanted:
        raise ConfigurationError(f"{chosen.name}: these options leave no case to measure")
    table = RowFile(chosen.folder / "rows.csv", study.case, study.result)
    known = table.read()
    unused = len(known.keys() - set(wanted))
    if unused:
        print(f"{table.path}: {unused} rows belong to other options; they stay, unused")
    mirror = build_mirror(chosen) if chosen.wandb else None
    try:
        measure_missing(study, wanted, known, table, device, mirror)
        summary = report(study, wanted, known, chosen, mirror)
    except BaseException as end:
        if isinstance(end, KeyboardInterrupt):
            kept = len(known.keys() & set(wanted))
            print(f"{table.path} keeps {kept} of {len(wanted)} cases; the same command continues")
        if mirror is not None:
            mirror.finish(1)
        raise
    if mirror is not None:
        mirror.finish(0)
    return summary


def measure_missing(
    study: Study[Any, AnyCase, AnyResult],
    wanted: Sequence[AnyCase],
    known: dict[AnyCase, Measured[AnyResult]],
    table: "RowFile[AnyCase, AnyResult]",
    device: torch.device,
    mirror: "WandbSink | None",
) -> None:
    """Measure the cases that have no row, and write each row before the next case begins."""
    circumstances = (hardware(device), commit() or "unknown")
    distinctive = distinctive_fields(wanted)
    bar = tqdm(total=len(wanted), unit="case", disable=None)
    with bar:
        for number, case in enumerate(wanted):
            words = describe(case, distinctive)
            bar.set_description(words)
            if case not in known:
                start = time.perf_counter()
                result = study.measure(case, device)
                seconds = time.perf_counter() - start
                known[case] = Measured(result, round(seconds, 3), *circumstances)
                table.append(case, known[case])
                bar.write(f"{words}: {seconds:.1f} s")
            if mirror is not None:
                mirror(number, numbers_of(known[case].result))
            bar.update()


def report(
    study: Study[AnyOptions, AnyCase, AnyResult],
    wanted: Sequence[AnyCase],
    known: Mapping[AnyCase, Measured[AnyResult]],
    chosen: AnyOptions,
    mirror: "WandbSink | None",
) -> Summary:
    """Write the figure, result.json and row.md; put the row into the results file if asked to."""
    rows = [(case, known[case].result) for case in wanted]
    summary = study.summarise(rows)
    picture = save(study.draw(rows), chosen.folder / f"{chosen.name}.png")
    measured = [known[case] for case in wanted]
    provenance = {
        "command": chosen.command(),
        "commit": joined(row.commit for row in measured),
        "hardware": joined(row.hardware for row in measured),
        "seconds": round(sum(row.seconds for row in measured), 1),
    }
    result = {"study": chosen.name, **provenance, "options": asdict(chosen), **asdict(summary)}
    write_json(result | {"torch": torch.__version__}, chosen.folder / "result.json")
    row = markdown_row(chosen.name, summary, provenance)
    write_text(chosen.folder / "row.md", row + "\n")
    if chosen.record:
        record_row(Path(os.path.expanduser(chosen.results)), chosen.name, row)
    if mirror is not None:
        columns = columns_of(summary)
        lines = [[line[column] for column in columns] for line in summary.table]
        mirror.table(f"{chosen.name}/table", columns, lines)
        mirror.image(f"{chosen.name}/figure", picture)
        mirror.summary({"paper": summary.paper, "ours": summary.ours, "verdict": summary.verdict})
    return summary


def progress(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The same items behind an inner progress bar, which is gone when they are; a terminal only."""
    return iter(tqdm(items, desc=what, leave=False, disable=None))


def panels(num_rows: int, num_columns: int) -> "tuple[Figure, list[Axes]]":
    """A figure with a grid of axes, row by row, for :attr:`Study.draw`.

    Greys, line styles and markers tell curves apart, never colours; every axis says its unit.
    """
    figure, _ = new_figure(num_rows)
    figure.clear()
    figure.set_size_inches(1 + 6 * num_columns, 1 + 4 * num_rows)
    axes = [axes for row in figure.subplots(num_rows, num_columns, squeeze=False) for axes in row]
    for one in axes:
        one.grid(color="0.9")
    return figure, axes


# --- rows on disk --------------------------------------------------------------------------------


class RowFile(Generic[AnyCase, AnyResult]):
    """A CSV of one row per case, appended row by row.

    Columns are the fields of the case, those of the result, and the circumstances. Text stands as
    it is, everything else as JSON, so that numbers come back as they went.

    Args:
        path: the file; its folder is made if it is missing.
        case: dataclass of the case: hashable plain values.
        result: dataclass of the result: plain values and lists of them.
    """

    def __init__(self, path: Path, case: type[AnyCase], result: type[AnyResult]) -> None:
        self.path = path
        self.case = case
        self.result = result
        self.kinds = {**kinds_of(case), **kinds_of(result)}
        self.columns = [*self.kinds, *EVIDENCE]

    def read(self) -> dict[AnyCase, Measured[AnyResult]]:
        """Every complete row by its case; a last line torn by a crash is cut off the file.

        Raises:
            StorageError: the file has other columns, or a line that is no row.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_bytes() if self.path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if not whole:
                self.path.write_text(as_csv_line(self.columns), encoding="utf-8")
            elif whole != content:
                self.path.write_bytes(whole)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be opened ({error.strerror})") from error
        lines = self._cells(whole)
        if lines and lines[0] != self.columns:
            raise StorageError(
                f"{self.path} has other columns than this version writes: choose another out=FOLDER"
            )
        return dict(self._decode(number, cells) for number, cells in enumerate(lines[1:], 2))

    def _cells(self, content: bytes) -> list[list[str]]:
        """The cells of every line.

        Raises:
            StorageError: it is no CSV file.
        """
        csv.field_size_limit(LARGEST_CELL)
        try:
            return list(csv.reader(io.StringIO(content.decode("utf-8"), newline="")))
        except (UnicodeDecodeError, csv.Error) as error:
            raise StorageError(
                f"{self.path} is not a table of rows ({error}): choose another out=FOLDER"
            ) from None

    def append(self, case: AnyCase, row: Measured[AnyResult]) -> None:
        """Write one row through to the disk.

        Raises:
            StorageError: the file cannot be written.
        """
        values = {**plain(case), **plain(row.result)}
        cells = [v if is_text(self.kinds[k]) else json.dumps(v) for k, v in values.items()]
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(as_csv_line([*cells, str(row.seconds), row.hardware, row.commit]))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error

    def _decode(self, number: int, cells: list[str]) -> tuple[AnyCase, Measured[AnyResult]]:
        """The case and the result in one line's cells."""
        try:
            text = dict(zip(self.columns, cells, strict=True))
            values = {
                name: text[name] if is_text(kind) else json.loads(text[name])
                for name, kind in self.kinds.items()
            }
            case = self.case(**{name: values[name] for name in kinds_of(self.case)})
            result = self.result(**{name: values[name] for name in kinds_of(self.result)})
            return case, Measured(result, float(text["seconds"]), text["hardware"], text["commit"])
        except (ValueError, TypeError):
            raise StorageError(
                f"{self.path}, line {number}: not a row of this study; delete the line to measure "
                "its case again"
            ) from None


def kinds_of(kind: Any) -> dict[str, Any]:
    """Field names and types of a dataclass."""
    return {f.name: f.type for f in fields(kind)}


def is_text(kind: Any) -> bool:
    """Whether a field's values are written as they are."""
    return kind is str or get_origin(kind) is Literal


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict, in the order of its fields."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def numbers_of(result: Any) -> dict[str, float]:
    """The numbers among a result's fields, as a chart can show them."""
    return {
        name: float(value)
        for name, value in plain(result).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def as_csv_line(cells: Sequence[str]) -> str:
    """One line of a CSV file."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def write_text(path: Path, text: str) -> None:
    """Write a small file at once or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


# --- the record in Markdown ----------------------------------------------------------------------


def markdown_row(name: str, summary: Summary, provenance: Mapping[str, Any]) -> str:
    """The study's row for the results page."""
    cells = [
        name, summary.paper, summary.ours, summary.verdict, f"`{provenance['command']}`",
        provenance["commit"], provenance["hardware"], f"{provenance['seconds']:.0f} s",
    ]  # fmt: skip
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def record_row(path: Path, name: str, row: str) -> None:
    """Replace what stands between ``<!-- study:NAME -->`` and ``<!-- /study:NAME -->`` by the row.

    Without such markers the block goes to the end of the file; without a file, one is made.

    Raises:
        StorageError: the file cannot be read or written, or an end marker is missing.
    """
    first, last = f"<!-- study:{name} -->", f"<!-- /study:{name} -->"
    header = "| " + " | ".join(MARKDOWN_COLUMNS) + " |\n" + "|---" * len(MARKDOWN_COLUMNS) + "|"
    block = f"{first}\n{header}\n{row}\n{last}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    if first not in text:
        write_text(path, f"{text.rstrip()}\n\n{block}\n")
        return
    before, _, after = text.partition(first)
    if last not in after:
        raise StorageError(f"{path}: {first} has no {last} after it")
    write_text(path, before + block + after.partition(last)[2])


def print_summary(summary: Summary, chosen: StudyOptions) -> None:
    """Print the table, both values and the verdict for people."""
    columns = columns_of(summary)
    lines = [columns, *([as_cell(line[column]) for column in columns] for line in summary.table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"paper:   {summary.paper}\nours:    {summary.ours}\nverdict: {summary.verdict}")
    print(f"files:   {chosen.folder}/{{rows.csv, {chosen.name}.png, result.json, row.md}}")


def columns_of(summary: Summary) -> list[str]:
    """The table's columns; none of a table without lines."""
    return list(summary.table[0]) if summary.table else []


def as_cell(value: Any) -> str:
    """A table's value: five digits of a number, a dash for what does not exist."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# --- circumstances -------------------------------------------------------------------------------


def distinctive_fields(cases: Sequence[Any]) -> list[str]:
    """The fields in which the cases differ; all of them where there is nothing to tell apart."""
    values = [plain(case) for case in cases]
    differing = [name for name in values[0] if len({value[name] for value in values}) > 1]
    return differing or list(values[0])


def describe(case: Any, names: Sequence[str]) -> str:
    """Some fields of a case in one line."""
    return " ".join(f"{name}={as_word(getattr(case, name))}" for name in names)


def as_word(value: Any) -> str:
    """A value as ``key=value`` words write it."""
    if value is None:
        return "null"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list) else str(value)


def joined(words: Iterable[str]) -> str:
    """The distinct words in order."""
    return ", ".join(dict.fromkeys(words))


def build_mirror(chosen: StudyOptions) -> "WandbSink":
    """The W&B run of a study."""
    from invformer.runs.wandb_sink import WandbSink

    return WandbSink(
        chosen.folder,
        name=f"study-{chosen.name}",
        config=asdict(chosen) | {"command": chosen.command(), "commit": commit() or "unknown"},
        project=chosen.project,
        mode="auto",
        group="studies",
        tags=[chosen.name],
    )
