"""The run log: one row per step, nothing lost, nothing waited for between flushes."""

import json
from pathlib import Path

import pytest
import torch

from invformer.errors import StorageError
from invformer.runs.run_log import JsonLinesSink, RunLog, read_rows


def test_rows_carry_their_own_step_and_everything_recorded_for_it() -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    log = RunLog([lambda step, row: rows.append((step, row))])
    log.record(1, {"b": torch.tensor(2.5)})
    log.record(0, {"a": 1.0})
    log.record(1, {"c": torch.tensor(4)})
    log.flush()
    assert rows == [(0, {"a": 1.0}), (1, {"b": 2.5, "c": 4.0})]


def test_a_flush_copies_all_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: copies.append(1) or original(t))
    log = RunLog([])
    for step in range(20):
        log.record(step, {key: torch.tensor(float(step)) for key in "abcde"})
    rows = log.flush()
    assert len(copies) == 1
    assert rows[7]["c"] == 7.0


def test_float32_values_arrive_unrounded() -> None:
    log = RunLog([])
    value = torch.tensor(0.1, dtype=torch.float32)
    log.record(0, {"x": value})
    assert log.flush()[0]["x"] == value.double().item()


def test_metrics_are_written_as_one_json_object_per_step(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink(0, {"train/bpc": 2.0})
    sink(1, {"train/bpc": float("inf")})
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 0, "train/bpc": 2.0},
        {"step": 1, "train/bpc": "inf"},
    ]


def test_a_resumed_run_replaces_the_rows_it_is_about_to_repeat(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "to')
    JsonLinesSink(path, first_step=3)(3, {"x": 1.0})
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3]


def test_rows_that_are_missing_before_the_step_a_run_continues_from_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    for step in range(4):
        sink(step, {"a": 1.0})
    JsonLinesSink(path, first_step=4)
    assert not caplog.records
    path.write_bytes(path.read_bytes()[:-5])  # the end of the file is lost
    JsonLinesSink(path, first_step=4)
    path.unlink()
    JsonLinesSink(path, first_step=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: the rows of steps 3 to 3 are lost; the run goes on without them",
        f"{path}: the rows of steps 0 to 1 are lost; the run goes on without them",
    ]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot write"):
        sink(0, {"x": 1.0})
