"""What every study is made of, and the runner that makes one restartable, recorded and comparable.

A study is a module of this package with the parts of :class:`Study`; studies/tightness.py is one.
``python -m studies`` finds it by its class ``Options`` and the first line of its docstring.

A row is written as soon as its case is measured; the next start measures only the cases without a
row. A row belongs to a case only if every field of it agrees: after a change of options new rows
join the file and the old ones stay there, unused. Loops of more than ten seconds inside ``measure``
go through :func:`progress`.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
from tqdm import tqdm

from invformer.config.load import command_line, parse_or_exit
from invformer.config.schema import SEED
from invformer.config.section import Root, option
from invformer.errors import ConfigurationError
from invformer.processes.console import outlive_console
from invformer.processes.exit import guarded
from invformer.report.plots import save
from invformer.runs.files import write_json
from invformer.runs.machine import commit, cpu_name, pick_device
from studies.report import Figure, Item, Rows, Summary, differing, finished
from studies.rows import AnyCase, AnyResult, Measured, RowFile

AnyOptions = TypeVar("AnyOptions", bound="StudyOptions")
AnyStudy = TypeVar("AnyStudy", bound="Study[Any, Any, Any]")


@dataclass(kw_only=True)
class StudyOptions(Root):
    """What can be set in every study."""

    out: str | None = option(None, "folder of the results; null is checkpoints/studies/NAME")
    seed: int = option(0, "of weights, inputs and starts", SEED)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes a GPU if there is one")
    num_threads: int | None = option(None, "CPU threads; null leaves PyTorch's choice", "[1, 1024]")
    debug: bool = option(False, "show tracebacks instead of one-line errors")

    def __init_subclass__(cls) -> None:
        """The program is the module of the class, also where it is run as ``__main__``."""
        spec = sys.modules[cls.__module__].__spec__
        cls.program = f"-m {spec.name if spec else cls.__module__}"

    @property
    def name(self) -> str:
        """The study's name."""
        return self.program.rpartition(".")[2]

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(os.path.expanduser(self.out or f"checkpoints/studies/{self.name}"))


@dataclass(frozen=True)
class Study(Generic[AnyOptions, AnyCase, AnyResult]):
    """One published experiment.

    Attributes:
        options: what can be set; ``--help`` prints its docstring.
        case: everything the numbers of a row depend on, and nothing else.
        result: what is measured; a list becomes one cell of the CSV, as JSON. No field has the name
            of one of the case's.
        draw: the figure, which starts from ``report.panels``; None if the table says it all.
    """

    options: type[AnyOptions]
    case: type[AnyCase]
    result: type[AnyResult]
    cases: Callable[[AnyOptions], Iterable[AnyCase]]
    measure: Callable[[AnyCase, torch.device], AnyResult]
    summarise: Callable[[Rows[AnyCase, AnyResult]], Summary]
    draw: Callable[[Rows[AnyCase, AnyResult]], Figure] | None = None


def case_of(kind: type[AnyCase], chosen: object, /, **values: Any) -> AnyCase:
    """A case with the given values, in other fields options of the same name, or their defaults."""
    names = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    same = {name: getattr(chosen, name) for name in names if hasattr(chosen, name)}
    return kind(**same | values)


def grid(
    kind: type[AnyCase], chosen: object, same: Mapping[str, Any] = {}, /, **varied: Iterable[Any]
) -> list[AnyCase]:
    """A case for every combination of values, the last field varying fastest."""
    combinations = itertools.product(*varied.values())
    return [
        case_of(kind, chosen, **same, **dict(zip(varied, c, strict=True))) for c in combinations
    ]


def program(study: AnyStudy) -> AnyStudy:
    """The study; if ``python -m studies.NAME`` has started its module, run it and exit."""
    if study.options.__module__ == "__main__":
        raise SystemExit(main(study, sys.argv[1:]))
    return study


def main(study: Study[AnyOptions, Any, Any], argv: Sequence[str]) -> int:
    """Parse ``key=value`` words, run, report.

    Returns:
        0, or the code of what went wrong: 130 after Ctrl-C, 143 after SIGTERM; every finished case
        is kept.

    Raises:
        SystemExit: 0 after ``--help``, 2 after one line about a bad argument.
    """
    outlive_console()
    chosen = parse_or_exit(argv, study.options)
    signal.signal(signal.SIGINT, interrupt)  # Ctrl-C says which cases are kept
    figure = f", {chosen.name}.png" if study.draw else ""
    files = f"files:   {chosen.folder}/{{rows.csv{figure}, result.json}}"
    return guarded(lambda: print(run(study, chosen), files, sep="\n"), debug=chosen.debug)


class ControlC(KeyboardInterrupt):
    """SIGINT, as a type of its own.

    If a plain KeyboardInterrupt passes through code executed from a string (importing torch
    executes some), Python later ends ``python -m`` by the signal, whatever the exit code.
    """


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT that raises :class:`ControlC`."""
    raise ControlC


def run(study: Study[AnyOptions, AnyCase, AnyResult], chosen: AnyOptions) -> Summary:
    """Measure every case without a row; summarise and draw the cases that were asked for.

    Leaves in the study's folder: rows.csv, NAME.png if it has a figure, and result.json.

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
    if unused := len(known.keys() - set(wanted)):
        print(f"{table.path}: {unused} rows belong to other options; they stay, unused")
    try:
        measure_missing(study, wanted, known, table, device)
    except KeyboardInterrupt:
        kept = len(known.keys() & set(wanted))
        print(f"{table.path} keeps {kept} of {len(wanted)} cases; the same command continues")
        raise
    rows = [(case, known[case].result) for case in wanted]
    summary = study.summarise(rows)
    if study.draw is not None:
        save(finished(study.draw(rows)), chosen.folder / f"{chosen.name}.png")
    measured = [known[case] for case in wanted]
    result = {
        "study": chosen.name,
        "command": command_line(chosen),
        "commit": ", ".join(dict.fromkeys(row.commit for row in measured)),
        "hardware": ", ".join(dict.fromkeys(row.hardware for row in measured)),
        "seconds": round(sum(row.seconds for row in measured), 1),
        "options": asdict(chosen),
        "outcome": summary.outcome,
        **asdict(summary),
        "torch": torch.__version__,
    }
    write_json(result, chosen.folder / "result.json")
    return summary


def measure_missing(
    study: Study[Any, AnyCase, AnyResult],
    wanted: Sequence[AnyCase],
    known: dict[AnyCase, Measured[AnyResult]],
    table: RowFile[AnyCase, AnyResult],
    device: torch.device,
) -> None:
    """Measure the cases that have no row, and write each row before the next case begins."""
    circumstances = (hardware(device), commit() or "unknown")
    names = differing(wanted) or list(vars(wanted[0]))
    with tqdm(total=len(wanted), unit="case", disable=None) as bar:
        for case in wanted:
            words = " ".join(f"{name}={getattr(case, name)}" for name in names)
            bar.set_description(words)
            if case not in known:
                start = time.perf_counter()
                result = study.measure(case, device)
                seconds = time.perf_counter() - start
                known[case] = Measured(result, round(seconds, 3), *circumstances)
                table.append(case, known[case])
                bar.write(f"{words}: {seconds:.1f} s")
            bar.update()


def hardware(device: torch.device) -> str:
    """What the numbers were computed on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def progress(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The same items behind an inner progress bar, which is gone when they are; a terminal only."""
    return iter(tqdm(items, desc=what, leave=False, disable=None))
