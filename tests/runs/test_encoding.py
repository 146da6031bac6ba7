"""Nested state comes back as it was, bit for bit, through safetensors and JSON."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from invformer.runs.encoding import dump, from_bytes, pack, parse, to_bytes, unpack

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool,
)  # fmt: skip


def through_files(tree: Any) -> Any:
    plain, tensors = pack(tree)
    content = to_bytes(tensors)
    read = from_bytes(content, "here")
    return unpack(parse(dump(plain), "here"), read, "here")


def same(one: Any, other: Any) -> bool:
    """Equal in value and type; tensors and floats bit for bit, dicts in their order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        raw = [t.contiguous().flatten().view(torch.uint8) for t in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, float):
        return one.hex() == other.hex()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(
    tensor_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
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
    assert same(through_files(tree), tree)


@pytest.mark.parametrize("value", [{1}, b"x", object(), {(1,): 1}, 1j])
def test_values_that_are_not_plain_are_refused_when_they_are_saved(value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint h"):
        pack({"deep": [value]})
