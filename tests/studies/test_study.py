"""The frame of studies: rows, signals, verdicts, runs and the list of all."""

import json
import math
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invformer.config.load import load_config
from invformer.config.section import option
from invformer.errors import CertificateViolation, InvformerError, StorageError
from studies import __main__ as listing
from studies import runs
from studies.report import Summary
from studies.rows import Measured, RowFile
from studies.study import Study, StudyOptions, main, run

STUDIES = listing.find_studies(Path(listing.__file__).parent)


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Square numbers."""

    numbers: list[int] = option([1, 2, 3], "what to square", within="[0, 1000]")
    offset: float = option(0.0, "added to every square", within="[0, 1]")


@dataclass(frozen=True)
class Case:
    number: int
    offset: float
    kind: Literal["plain", "odd"]
    label: str | None


@dataclass(frozen=True)
class Result:
    square: float
    history: list[float]


@dataclass
class Squares:
    """A study that remembers what it measured and can be told where to fail."""

    stop_at: int | None = None
    error: type[Exception] | None = None
    measured: list[int] = field(default_factory=list)

    def cases(self, options: Options) -> list[Case]:
        return [Case(n, options.offset, "odd" if n % 2 else "plain", None) for n in options.numbers]

    def measure(self, case: Case, device: torch.device) -> Result:
        if case.number == self.stop_at and self.error:
            raise self.error("stopped")
        if case.number == self.stop_at:
            signal.raise_signal(signal.SIGINT)
        self.measured.append(case.number)
        return Result(case.number**2 + case.offset, [math.nan, 0.1])

    def summarise(self, rows: list[tuple[Case, Result]]) -> Summary:
        table = [{"number": c.number, "square": r.square, "paper": math.nan} for c, r in rows]
        ours = ", ".join(str(r.square) for _, r in rows)
        return Summary(table, [(True, ours)])

    def study(self) -> Study:
        return Study(Options, Case, Result, self.cases, self.measure, self.summarise)  # type: ignore[arg-type]


def options_in(folder: Path, *words: str) -> Options:
    return load_config([f"out={folder}", *words], Options)


@pytest.mark.parametrize(("error", "code"), [(None, 130), (CertificateViolation, 6)])
def test_ctrl_c_or_an_error_keeps_the_finished_rows_and_the_next_start_does_the_rest(
    error: type[Exception] | None, code: int, tmp_path, capsys
) -> None:
    argv = [f"out={tmp_path}"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the study hears it
    assert main(Squares(3, error).study(), argv) == code
    out, said = capsys.readouterr()
    assert ("keeps 2 of 3 cases; the same command continues" in out) == (error is None)
    assert said.splitlines()[-1] == f"error: {'stopped' if error else 'interrupted'}"
    assert {f.name for f in tmp_path.iterdir()} == {"rows.csv"}
    second = Squares()
    assert main(second.study(), argv) == 0
    assert second.measured == [3]
    assert "verdict: reproduced" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], result["findings"]) == ("reproduced", [[True, "1.0, 4.0, 9.0"]])
    assert result["table"][0] == {"number": 1, "square": 1.0, "paper": None}


def test_other_options_add_rows_and_are_never_mixed_with_the_old_ones(tmp_path, capsys) -> None:
    run(Squares().study(), options_in(tmp_path))
    other = Squares()
    summary = run(other.study(), options_in(tmp_path, "offset=0.5", "numbers=[2]"))
    assert other.measured == [2]
    assert summary.findings == [(True, "4.5")]
    assert "3 rows belong to other options" in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize("missing", [1, 20])
def test_a_torn_last_line_is_measured_again_and_a_damaged_one_is_named(tmp_path, missing) -> None:
    run(Squares().study(), options_in(tmp_path))
    rows = tmp_path / "rows.csv"
    rows.write_bytes(rows.read_bytes()[:-missing])
    second = Squares()
    assert run(second.study(), options_in(tmp_path)).findings == [(True, "1.0, 4.0, 9.0")]
    assert second.measured == [3]
    lines = rows.read_text().splitlines()
    assert len(lines) == 4
    rows.write_text("\n".join([*lines[:2], "nonsense", *lines[3:]]) + "\n")
    with pytest.raises(StorageError, match=r"rows\.csv, line 3: not a row"):
        run(Squares().study(), options_in(tmp_path))


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\xff\xfe\x00\n"])
def test_a_file_that_is_no_table_of_its_rows_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(StorageError, match=r"rows\.csv has other columns"):
        run(Squares().study(), options_in(tmp_path))
    assert (tmp_path / "rows.csv").read_bytes() == content


def test_the_list_has_every_study_with_its_line_and_names_the_one_that_was_meant(capsys) -> None:
    assert listing.main([]) == 0
    out = capsys.readouterr().out
    for name, line in STUDIES.items():
        assert f"  {name} " in out
        assert line
        assert line in out
    assert {"tightness", "invertibility", "breaking", "depth_stability"} <= STUDIES.keys()
    assert listing.main(["tightnes"]) == 2
    assert "run python -m studies.tightness" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("held", "outcome"),
    [
        ([], "not in the paper"), ([None, None], "not in the paper"),
        ([True, None], "reproduced"), ([True, False], "partly reproduced"),
        ([False, None], "not reproduced"),
    ],
)  # fmt: skip
def test_a_study_without_a_claim_reproduces_nothing(held: list[bool | None], outcome: str) -> None:
    findings = [(holds, "words") for holds in held]
    for must in ([], [(True, "must")]):
        assert Summary([], findings, must).outcome == outcome
    assert Summary([], findings, [(False, "must")]).outcome == "not reproduced"


numbers = st.floats(allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(
    number=st.integers(-(10**12), 10**12),
    offset=numbers,
    label=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\r")),
    square=numbers,
    history=st.lists(numbers),
)
def test_rows_come_back_from_the_file_exactly(
    tmp_path_factory, number: int, offset: float, label: str | None,
    square: float, history: list[float],
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    case = Case(number, offset, "odd", label)
    row = Measured(Result(square, history), 1.25, 'a "CPU", 2 threads', "abc-dirty")
    table = RowFile(path, Case, Result)
    assert table.read() == {}
    table.append(case, row)
    table.append(replace(case, number=number + 1), row)
    assert table.read() == {case: row, replace(case, number=number + 1): row}


PROGRAM = """
import os, signal, sys, time
number = int(sys.argv[1])
signal.signal(number, lambda *_: sys.exit(77))  # saved
os.kill(os.getppid(), number)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_study_stops_the_run_that_it_waits_for_first(
    number: signal.Signals, tmp_path, monkeypatch
) -> None:
    (tmp_path / "run.py").write_text(PROGRAM)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(InvformerError, match="exit code 77"):
            runs.call("run.py", str(int(number)))
    finally:
        signal.signal(number, before)
    assert heard == [number]
