"""metrics.jsonl: one row per step, and nothing lost."""

import json
import os
import random
from math import inf
from pathlib import Path
from typing import Any

import pytest

from invformer.errors import StorageError
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.run_log import read_rows
from tests.support.small_runs import write_rows


def test_a_resumed_run_replaces_the_rows_it_is_about_to_repeat(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "to')
    write_rows(path, {3: {"x": 1.0}}, first_step=3)
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3]


LINES = [json.dumps({"step": step, "x": step / 2}).encode() for step in range(30)]
DAMAGES: dict[str, tuple[bytes, bytes]] = {
    "no JSON": (b'"x": 6', b'"x": 6}'),
    "no UTF-8": (b'"x"', b'"\xff"'),
    "a number": (LINES[12], b"5"),
    "no step": (LINES[12], b'{"step": null}'),
    "a huge step": (LINES[12], b'{"step": ' + b"9" * 5000 + b"}"),
    "deep nesting": (LINES[12], b"[" * 100_000),
    "a step of another row": (b'"step": 12', b'"step": 52'),
    "a value that is a list": (b"6.0", b"[6]"),
    "zeros": (LINES[12], bytes(20)),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_line_costs_no_other_row_and_is_kept_beside_the_file(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = LINES[12].replace(*DAMAGES[how])
    assert damaged != LINES[12]
    path.write_bytes(b"\n".join([*LINES[:12], damaged, *LINES[13:]]) + b"\n")
    JsonLinesLogger(path, first_step=25)
    steps = [row["step"] for row in read_rows(path)]
    assert steps == [step for step in range(25) if step != 12]
    assert (tmp_path / "metrics.damaged").read_bytes() == damaged + b"\n"
    assert any("no rows for steps 12 to 12" in record.getMessage() for record in caplog.records)


def test_flipped_bits_lose_one_row_at_most_or_two_that_became_one_line(tmp_path: Path) -> None:
    path, content = tmp_path / "metrics.jsonl", b"\n".join(LINES) + b"\n"
    for seed in range(60):
        place, bit = random.Random(seed).randrange(8 * len(content)) // 8, seed % 8
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        JsonLinesLogger(path, first_step=30)
        kept = {row["step"] for row in read_rows(path)}
        assert len(kept) >= 28
        aside = tmp_path / "metrics.damaged"
        lines = path.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
        assert sorted(lines.split()) == sorted(bytes(flipped).split())
        aside.unlink(missing_ok=True)


def test_rows_written_twice_are_in_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*LINES[:20], *LINES[10:]]) + b"\n")
    JsonLinesLogger(path, first_step=30)
    assert [row["step"] for row in read_rows(path)] == list(range(30))


def test_rows_that_are_missing_before_the_step_a_run_continues_from_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(LINES[:4]) + b"\n")
    JsonLinesLogger(path, first_step=4)
    assert not caplog.records
    path.write_bytes(path.read_bytes()[:-5])  # the end of the file is lost
    JsonLinesLogger(path, first_step=4)
    path.unlink()
    JsonLinesLogger(path, first_step=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: there are no rows for steps 3 to 3",
        f"{path}: 1 damaged lines are now in metrics.damaged",
        f"{path}: there are no rows for steps 0 to 1",
    ]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/x")])
def test_metrics_in_no_regular_file_are_a_storage_error(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read"):
        JsonLinesLogger(tmp_path / "metrics.jsonl")


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot write"):
        write_rows(tmp_path / "missing" / "metrics.jsonl", {0: {"x": 1.0}})


def test_numbers_of_the_newest_step_join_its_row_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLinesLogger(path)
    logger.log_metrics({"x": 1.0}, 0)
    assert not path.exists()
    logger.log_metrics({"val/bpc": 2.0}, 0)
    logger.save()
    logger = JsonLinesLogger(path, first_step=1)  # and afterwards too
    logger.log_metrics({"inverse/residual_max": 0.0}, 0)
    logger.log_metrics({"x": inf}, 1)
    logger.save()
    first = {"step": 0, "x": 1.0, "val/bpc": 2.0, "inverse/residual_max": 0.0}
    assert read_rows(path) == [first, {"step": 1, "x": "inf"}]
