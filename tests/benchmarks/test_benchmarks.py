"""The benchmarks run, compare like with like, and are what their README says."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import monitor_cost, run, tasks, timing
from benchmarks.models import MODELS, Case, build, windows
from benchmarks.table import HEAD, line, table
from benchmarks.timing import Spread, in_turns, paired
from tests.support.processes import ROOT, python

CPU = torch.device("cpu")
TINY = Case(seq_len=16, d_model=16, num_layers=1, num_heads=2, batch_size=2)


@pytest.fixture(autouse=True)
def _single_precision(monkeypatch) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(timing, "SHORTEST_TURN", 0)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SHORTEST_TURN", 0)
        patch.setattr(tasks, "GENERATED", 4)
        return list(run.measure_case(run.Setting(TINY, CPU, "float32", seconds=0), memory=False))


def test_every_task_of_every_model_has_a_row_of_rates(rows) -> None:
    found = {(row["task"], row["variant"]) for row in rows}
    assert found >= {(task, model) for task in ("train", "evaluate") for model in MODELS} | {
        ("generate", "dot_product"), ("generate-together", "contractive_l2"), ("invert", "picard"),
        ("invert", "picard-without-evidence"), ("train", "contractive_l2+monitor16"),
    }  # fmt: skip
    for row in rows:
        median, low, high = row["characters_per_second"]
        assert 0 < low <= median <= high
        assert row["turns"] >= 3
        assert row["variant"] not in row["times_as_fast_as"]
    *head, lines = [*HEAD, table({"rows": rows}).splitlines()]
    assert lines[:2] == head
    ids = [text.split(" | ")[0].removeprefix("| ") for text in lines[2:]]
    assert ids == [row["id"] for row in rows]
    assert len({*ids}) == len(ids)


def test_the_plain_model_looks_at_no_later_character() -> None:
    model = build("plain", TINY, CPU).eval()
    inputs, _ = windows(TINY, CPU)
    changed = inputs.clone()
    changed[:, 10] += 1
    assert torch.equal(model(inputs)[:, :10], model(changed)[:, :10])


def test_pieces_of_work_take_turns_and_the_order_alternates() -> None:
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = in_turns(work, seconds=0, device=CPU)
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}
    assert "".join(calls[-6:]) == "abbaab"


def test_ratios_are_paired_before_they_are_averaged() -> None:
    assert paired([1, 2, 3], [2, 4, 6]) == Spread(0.5, 0.5, 0.5)
    assert Spread.of([3.0]) == Spread(3, 3, 3)


def test_every_number_in_the_performance_table_is_a_row_of_a_committed_file() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    block = readme.split("<!-- benchmarks:begin -->")[1].split("<!-- benchmarks:end -->")[0]
    committed = [
        line(row)
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if "recipe" not in row  # of benchmarks.recipes, whose table is in docs/results.md
    ]
    shown = [text for text in block.splitlines() if text.startswith(("| cpu/", "| cuda/"))]
    assert shown
    assert [text for text in shown if text not in committed] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "("], "argument --only: '(' is no regular expression: "),
        (["--quick", "--only", "zzz"], "argument --only: 'zzz' matches no case of: n32-d32-l2"),
        (["--device", "cuda"], "argument --device: PyTorch finds no CUDA device here"),
        (["--seconds", "0"], "argument --seconds: 0 is not above 0"),
        (["--seconds", "nan"], "argument --seconds: nan is not above 0"),
        (["--threads", "0"], "argument --threads: 0 is not in [1, 1024]"),
        (["--threads", "many"], "argument --threads: invalid threads value: 'many'"),
        (["--compile"], "argument --compile: torch.compile does not work here: no compiler"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line_beforehand(
    words: list[str], message: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program, "measure_case", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(program, "compiler_complaint", lambda _: "no compiler")
    monkeypatch.setattr(sys, "argv", ["benchmarks", f"--out={tmp_path / 'a' / 'b.json'}", *words])
    with pytest.raises(SystemExit, match=r"^2$"):
        program.main()
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"error: {message}")
    assert not (tmp_path / "a").exists()


def test_an_interrupted_run_leaves_earlier_results_alone(tmp_path, monkeypatch, capsys) -> None:
    row = {"id": "a row", "characters_per_second": [1.0] * 3, "times_as_fast_as": {}}

    def measured(*_: object, **__: object) -> Iterator[dict]:
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "measure_case", measured)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick"])
    (tmp_path / "quick.json").write_text("precious")
    with pytest.raises(SystemExit, match=r"^130$"):
        program.main()
    assert (tmp_path / "quick.json").read_text() == "precious"
    assert len(json.loads((tmp_path / "quick.json.tmp").read_text())["rows"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: interrupted; ")
    assert "quick.json.tmp keeps 1 rows" in error
    assert error.count("\n") == 1


def test_the_cost_of_estimates_is_that_of_their_turns_whatever_the_machine_does() -> None:
    step = {True: 1.06, False: 1.0}
    seconds = {s: step[monitor_cost.is_watched(s)] * (1 + s // 100) for s in range(700) if s % 25}
    assert monitor_cost.costs(seconds) == pytest.approx([0.06] * 6)
    assert monitor_cost.costs({}) == monitor_cost.costs({s: 1.0 for s in range(150)}) == []


def test_a_training_by_turns_says_what_its_estimates_cost(tmp_path) -> None:
    size = ["model.d_model=8", "model.num_layers=1", "model.num_heads=2", "data.seq_len=8"]
    words = [*size, "trainer.max_steps=305", "logger=none", f"run.root={tmp_path}"]
    done = python("-m", "benchmarks.monitor_cost", *words)
    assert "of a step's" in done.stdout
    for word, said in (("trainer.max_steps=20", "two windows"), ("monitor.enabled=false", "time")):
        done = python("-m", "benchmarks.monitor_cost", *words, word, f"run.name={said}")
        assert (done.returncode, said in done.stderr) == (2, True)
