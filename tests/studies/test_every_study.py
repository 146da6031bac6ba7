"""The frame of studies, and every study at its smallest size: rows, figure, verdict, resuming."""

import importlib
import json
import math
import re
import signal
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invformer.config.load import load_config
from invformer.config.section import option
from invformer.errors import CertificateViolation, InvformerError, StorageError
from studies import __main__ as listing
from studies import runs
from studies.report import Outcome, Summary
from studies.rows import Measured, RowFile
from studies.study import Study, StudyOptions, main, run
from tests.support.processes import ROOT
from tests.support.saved_runs import Saved
from tests.support.small_runs import fitted

STUDIES = listing.find_studies(ROOT / "studies")
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(400))
MODEL = "d_model=12 num_heads=2 num_layers=1 seq_len=16 batch_size=4 num_steps=3"
SHORT = "data.name=text_file data.path=TEXT data.max_characters=4000"
RUN = "data=text_file,data.path=TEXT,model.num_layers=1,model.d_model=16,model.num_heads=2"

# The words of each study; TEXT is a file, CERTIFIED and TWIN are run folders, FEW steps of a run.
SMALL = {
    "ablation": f"only=[nothing] overrides=[{RUN},model.d_head=8,trainer.max_steps=2,"
    "trainer.val_every=2,logger=none]",
    "at_size": "parts=[step,kim] kinds=[certified] depths=[2] rates=1 minutes=60",
    "attention_distribution": f"{MODEL} {SHORT} data.val_characters=200 layer_sizes=[5] "
    "num_seeds=1 weights=[0.1]",
    "breaking": "",
    "damage": "models=[CERTIFIED,TWIN] bits=[4] noise=[2] dropped=[1] num_windows=1",
    "depth_stability": f"{MODEL.replace('num_layers=1', 'depths=[1,2]')} {SHORT} "
    "data.val_characters=200 kinds=[dot_product,l2,certified]",
    "early_warning": f"{MODEL} num_steps=20 families=[l2/adamw,bare/muon] texts=[TEXT] "
    "max_characters=4000 val_characters=190 adam_rates=[0.01,10] muon_rates=[0.01,10] "
    "runs_per_rate=1",
    "equal_time": "kinds=[nanogpt,nanogpt_tuned] adam_rates=[1e-3] minutes=[1e-6] num_turns=1 "
    f"overrides=[{RUN},model.d_ff=16,data.seq_len=8,data.batch_size=2,data.test_fraction=0.1]",
    "growth": "sizes=[4] num_sequences=2 attack_sizes=[7] num_attacked=1",
    "invertibility": "seq_len=8 d_model=8 num_heads=2 batch_size=2 num_steps=30 train_steps=5",
    "mass_splitting": "num_measures=9",
    "mean_field": "",
    "price": f"kinds=[certified] budgets=[2] rates=[0.01] val_every=1 overrides=[{RUN},"
    "model.d_ff=16,data.seq_len=8,data.batch_size=2,data.test_fraction=0.1]",
    "search": "lengths=[8,12] vocabularies=[9,30] num_places=2 d_model=16",
    "tightness": "sizes=[10,20] num_starts=4 num_steps=50",
    "whole_network": f"{MODEL.replace('d_model=12', 'd_model=24')} {SHORT} totals=[2,10] "
    "num_windows=3 pgd_steps=3",
}
CERTIFIED = "model.name=contractive_bounded model.certificate=causal model.strictly_causal=true"
TWIN = "model.name=dot_product model.certificate=null"


def words_in(folder: Path, name: str) -> list[str]:
    """The words of a study, with the text and the run folders that they name."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
        for run, kind in (("certified", CERTIFIED), ("twin", TWIN)):
            (folder / run).mkdir()
            Saved(folder / run, *kind.split()).save()
            row = {"step": 3, "val/nats": 2.5}
            (folder / run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = SMALL[name].replace("TEXT", str(text)).replace("TWIN", str(folder / "twin"))
    return found.replace("CERTIFIED", str(folder / "certified")).split()


@pytest.fixture
def _small(monkeypatch, command, without_plots) -> None:
    """No large matrices and no new processes: these are tested beside their studies."""

    def call(program: str, *words: str) -> None:
        if program == "train.py":
            fitted(words)
        else:
            assert command("evaluate", *words) == 0

    monkeypatch.setattr("studies.ablation.call", call)
    monkeypatch.setattr("studies.at_size.call", call)
    monkeypatch.setattr("studies.kinds.call", call)
    monkeypatch.setattr("studies.growth.GPT2_WIDTH", 96)  # not 768


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_leaves_rows_and_a_verdict(name: str, tmp_path, capfd) -> None:
    torch.set_default_dtype(torch.float32)
    study, out = importlib.import_module(f"studies.{name}").STUDY, tmp_path / "out"
    assert load_config([], study.options).folder == Path("checkpoints", "studies", name)
    columns = [f.name for part in (study.case, study.result) for f in fields(part)]
    assert len(set(columns)) == len(columns)
    argv = [*words_in(tmp_path, name), f"out={out}", "num_threads=1"]
    assert main(study, argv) == 0
    assert "verdict: " in capfd.readouterr().out
    result, rows = json.loads((out / "result.json").read_text()), (out / "rows.csv").read_text()
    assert result["outcome"] in get_args(Outcome)
    assert result["table"]
    assert study.draw is None or (out / f"{name}.png").stat().st_size > 10_000
    assert main(replace(study, measure=None, draw=None), argv) == 0
    again = json.loads((out / "result.json").read_text())
    assert (again["findings"], again["must"]) == (result["findings"], result["must"])
    assert (out / "rows.csv").read_text() == rows


def test_nothing_imports_a_study() -> None:
    for path in (ROOT / "studies").glob("[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^from studies\.(\w+) import", text, re.MULTILINE)
        together = re.findall(r"^from studies import (.+)$", text, re.MULTILINE)
        names += [name for line in together for name in line.split(", ")]
        assert not STUDIES.keys() & {*names}, path.name


@pytest.mark.parametrize(
    ("name", "words", "code", "message"),
    [
        ("attention_distribution", "num_heads=5", 2, "5 heads do not divide d_model=32"),
        ("attention_distribution", "data.val_characters=100", 3, "4 are asked for; raise"),
        ("whole_network", "data.val_fraction=0.97", 2, "leaves no text for training"),
        ("whole_network", "data.max_characters=9000 seq_len=5000", 3, "make 0 windows of 5000"),
        ("whole_network", "data.max_characters=9000 seq_len=8500", 3, "seq_len=8500: the"),
        ("growth", "checkpoint=/nowhere", 4, "/nowhere"),
        ("growth", "pretrained=configs text=README.md", 2, "no model with a tokenizer"),
        ("growth", "pretrained=m text=/nowhere", 3, "cannot be read"),
        ("growth", "text=README.md", 2, "belong together"),
        ("growth", "pretrained=m checkpoint=c text=README.md", 2, "either"),
        ("price", "kinds=[other]", 2, "'[other]' is not [certified|eight_blocks|eight_heads|"),
        ("ablation", "only=[no_bia]", 2, "did you mean 'no_bias'?"),
        ("tightness", "sizes=[]", 2, "leave no case"),
    ],
)
def test_impossible_options_are_refused_in_one_line(
    name: str, words: str, code: int, message: str, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    study = importlib.import_module(f"studies.{name}").STUDY
    try:
        found = main(study, [f"out={tmp_path}", *words.split()])
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert (found, error.count("\n"), message in error) == (code, 1, True), error


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
