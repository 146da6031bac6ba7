"""Named tensors as the bytes of a safetensors file, whose header is checked before it is used."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from invformer.errors import CheckpointError
from invformer.runs.strict_json import parse

MAX_HEADER = 4 << 20  # bytes; two hundred for each of twenty thousand tensors
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 8
MAX_LENGTH = 1 << 32  # of one dimension
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Spec(NamedTuple):
    """What a tensor is before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Type and shape of every tensor."""
    return {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def num_bytes(specs: Mapping[str, Spec]) -> int:
    """Memory that all of them take."""
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs.values())


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, the same for the same tensors.

    Raises:
        ValueError: a type, or a number of tensors, that :func:`read_specs` does not take.
    """
    if len(tensors) > MAX_TENSORS or any(len(t.shape) > MAX_DIMENSIONS for t in tensors.values()):
        raise ValueError(f"a checkpoint holds {MAX_TENSORS} tensors of {MAX_DIMENSIONS} dimensions")
    if foreign := {t.dtype for t in tensors.values()} - set(DTYPES.values()):
        raise ValueError(f"a checkpoint holds no tensors of {foreign.pop()}")
    return save({name: _alone(t) for name, t in tensors.items()})


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the host in memory that it shares with none, as safetensors wants it."""
    host = tensor.detach().cpu().contiguous()
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def from_bytes(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a file on the CPU; call :func:`read_specs` first.

    Raises:
        CheckpointError: the library refuses what the check of the header let pass.
    """
    try:
        tensors = load(data)
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: not readable as safetensors ({error})") from None
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise CheckpointError(f"{where}: tensor {name!r:.80} holds bytes that are no bools")
    return tensors


def read_specs(data: bytes, where: str) -> dict[str, Spec]:
    """Type and shape of the tensors in a file, once its header accounts for every byte.

    Args:
        data: the whole file.
        where: what errors begin with.

    Raises:
        CheckpointError: the header is too long, no JSON, or does not describe tensors that lie side
            by side and fill the file.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise CheckpointError(f"{where}: its header is longer than the file, or than any header")
    header = parse(data[8 : 8 + length], where)
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise CheckpointError(f"{where}: its header names no tensors, or too many")
    entries = [(name, *_read_entry(entry, name, where)) for name, entry in header.items()]
    end = 0
    for name, _, begin, stop in sorted(entries, key=lambda entry: entry[2:]):
        if begin != end:
            raise CheckpointError(f"{where}: tensor {name!r:.80} does not begin where another ends")
        end = stop
    if end != len(data) - 8 - length:
        raise CheckpointError(f"{where}: its tensors take {end} bytes, the file has others")
    return {name: spec for name, spec, _, _ in entries}


def _read_entry(entry: Any, name: str, where: str) -> tuple[Spec, int, int]:
    """One tensor's description: its spec, its first byte and the one behind its last."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
            len(entry) == 3
            and dtype in DTYPES
            and len(shape) <= MAX_DIMENSIONS
            and all(type(n) is int and 0 <= n <= MAX_LENGTH for n in (*shape,))
            and type(begin) is type(end) is int
            and 0 <= begin <= end
            and end - begin == DTYPES[dtype].itemsize * math.prod(shape)
        ):
            return Spec(DTYPES[dtype], tuple(shape)), begin, end
    raise CheckpointError(f"{where}: what it says about {name!r:.80} describes no tensor")


def refuse_other_specs(found: Mapping[str, Spec], wanted: Mapping[str, Spec], where: str) -> None:
    """Compare what a file holds with what is needed.

    Raises:
        CheckpointError: naming the first tensor that differs, in which way, and how many there are.
    """
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        have, want = found.get(name), wanted.get(name)
        if have != want:
            raise CheckpointError(
                f"{where}: its weights do not fit its configuration: "
                f"{name!r:.80} is {_shown(have)}, the model has {_shown(want)}"
            )


def _shown(spec: Spec | None) -> str:
    return "absent" if spec is None else f"{str(spec.dtype)[6:]}{list(spec.shape)}"


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity in it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None
