"""metrics.jsonl: one row per step, nothing lost; nested state comes back bit for bit."""

import json
import math
import os
import random
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from invformer.errors import StorageError
from invformer.runs.encoding import dump, from_bytes, pack, parse, to_bytes, unpack
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.run_log import read_rows

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
    tmp_path, how: str, caplog
) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = LINES[12].replace(*DAMAGES[how])
    assert damaged != LINES[12]
    path.write_bytes(b"\n".join([*LINES[:12], damaged, *LINES[13:]]) + b"\n")
    JsonLinesLogger(path, first_step=25)  # which drops the rows that it is about to repeat
    steps = [row["step"] for row in read_rows(path)]
    assert steps == [step for step in range(25) if step != 12]
    assert (tmp_path / "metrics.damaged").read_bytes() == damaged + b"\n"
    assert any("no rows for steps 12 to 12" in record.getMessage() for record in caplog.records)


def test_flipped_bits_lose_one_row_at_most_or_two_that_became_one_line(tmp_path) -> None:
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


def test_rows_that_are_missing_before_the_step_a_run_continues_from_are_told(
    tmp_path, caplog
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
def test_metrics_in_no_regular_file_are_a_storage_error(tmp_path, make: Any) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read"):
        JsonLinesLogger(tmp_path / "metrics.jsonl")


def test_numbers_of_the_newest_step_join_its_row_before_it_is_written(tmp_path) -> None:
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


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool,
)  # fmt: skip


def shown(value: Any) -> Any:
    """Equal in print if equal in value and type: tensors as their bytes, dicts in their order."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    return type(value)(map(shown, value)) if isinstance(value, list | tuple) else value


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99)
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), tensors
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers() | st.just("$"), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(trees)
def test_any_nested_state_comes_back(tree: Any) -> None:
    plain, tensors = pack(tree)
    read = from_bytes(to_bytes(tensors), "here")
    assert repr(shown(unpack(parse(dump(plain), "here"), read, "here"))) == repr(shown(tree))


@pytest.mark.parametrize("value", [{1}, b"x", object(), {(1,): 1}, 1j])
def test_values_that_are_not_plain_are_refused_when_they_are_saved(value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint h"):
        pack({"deep": [value]})
