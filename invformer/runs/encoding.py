"""Values and tensors as bytes and back: strict JSON beside safetensors, nothing that could run.

JSON has no tuples, no keys but text and no infinities. They are written as objects with the key
``"$"``: ``{"$": "tuple", "items": […]}``, ``{"$": "pairs", "items": [[key, value], …]}`` for a
mapping with other keys, ``{"$": "float", "value": "inf"}``. Tensors lie in a safetensors file,
which the JSON refers to: ``{"$": "tensor", "name": …}``.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from invformer.errors import CheckpointError

MAX_BYTES = 16 << 20
MAX_VALUES = 250_000  # a list of empty lists takes 25 times its text
MAX_DEPTH = 100
MAX_INT = 1 << 63
MAX_HEADER = 4 << 20  # bytes of a safetensors file beside its tensors
NON_FINITE = ("inf", "-inf", "nan")
TAG = "$"
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool,
)  # fmt: skip


# --- JSON ----------------------------------------------------------------------------------------


def dump(value: Any) -> bytes:
    """Plain values as JSON.

    Raises:
        TypeError, ValueError: a value is no JSON, or is not finite.
    """
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def parse(text: bytes, where: str) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        CheckpointError: no JSON, too much of it or too deep, a key that is given twice, a number
            that is not finite; ``where`` begins the message.
    """
    if len(text) > MAX_BYTES or sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CheckpointError(f"{where}: more values than a checkpoint has")
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_object, parse_float=_finite,
            parse_constant=_finite,
        )  # fmt: skip
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not the JSON of a checkpoint ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # readers differ in which value they take
        raise ValueError("a key is given twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return value


# --- nested state --------------------------------------------------------------------------------


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON values and the tensors they name.

    Subclasses of the plain types become the plain types; a tensor that occurs twice is kept twice.

    Args:
        tree: None, bools, integers of 64 bits, floats, text and dense tensors in dicts (with keys
            of text or integers), lists and tuples.

    Raises:
        TypeError: anything else.
    """
    tensors: dict[str, Tensor] = {}

    def packed(tree: Any, path: str) -> Any:
        if tree is None or isinstance(tree, bool):
            return tree
        if isinstance(tree, str):
            return str(tree)
        if isinstance(tree, int) and -MAX_INT <= tree < MAX_INT:
            return int(tree)
        if isinstance(tree, float):
            name = repr(float(tree))
            return {TAG: "float", "value": name} if name in NON_FINITE else float(tree)
        if isinstance(tree, Tensor):
            name = path or "tensor"
            while name in tensors:  # keys may hold the separator
                name += "'"
            tensors[name] = tree
            return {TAG: "tensor", "name": name}
        if isinstance(tree, list | tuple):
            items = [
                packed(item, f"{path}/{index}".removeprefix("/")) for index, item in enumerate(tree)
            ]
            return items if isinstance(tree, list) else {TAG: "tuple", "items": items}
        if isinstance(tree, Mapping) and all(map(_is_key, tree)):
            found = {
                key: packed(item, f"{path}/{key}".removeprefix("/")) for key, item in tree.items()
            }
            if all(isinstance(key, str) and key != TAG for key in found):
                return {str(key): item for key, item in found.items()}
            return {TAG: "pairs", "items": [[key, item] for key, item in found.items()]}
        raise TypeError(f"a checkpoint holds no {type(tree).__name__} ({path})")

    return packed(tree, ""), tensors


def unpack(plain: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """The tree that :func:`pack` was given.

    Raises:
        CheckpointError: the values are not what :func:`pack` writes, a tensor is missing, named
            twice or not named; ``where`` begins the message.
    """
    left = dict(tensors)

    def refuse(why: str) -> NoReturn:
        raise CheckpointError(f"{where}: {why}")

    def unpacked(plain: Any, depth: int) -> Any:
        if depth == 0:
            refuse("nested too deeply")
        if isinstance(plain, list):
            return [unpacked(item, depth - 1) for item in plain]
        if not isinstance(plain, dict):
            return plain
        match plain:
            case {"$": "tensor", "name": str(name), **rest} if not rest and name in left:
                return left.pop(name)
            case {"$": "float", "value": str(name), **rest} if not rest and name in NON_FINITE:
                return float(name)
            case {"$": "tuple", "items": list(items), **rest} if not rest:
                return tuple(unpacked(item, depth - 1) for item in items)
            case {"$": "pairs", "items": list(items), **rest} if not rest:
                pairs = [pair for pair in items if isinstance(pair, list) and len(pair) == 2]
                found = {key: unpacked(v, depth - 1) for key, v in pairs if _is_key(key)}
                return found if len(found) == len(items) else refuse("a mapping has no such keys")
            case {"$": tag}:
                refuse(f"no meaning is known for {tag!r:.40}, or its tensor is missing")
        return {key: unpacked(value, depth - 1) for key, value in plain.items()}

    tree = unpacked(plain, MAX_DEPTH)
    if left:
        refuse(f"nothing refers to tensor {next(iter(left))!r:.80}")
    return tree


def _is_key(key: Any) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


# --- tensors -------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """What a tensor is before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Type and shape of every tensor."""
    return {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def num_bytes(specs: Mapping[str, Spec]) -> int:
    """Memory that all of them take."""
    return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs.values())


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, the same for the same tensors."""
    return save({name: _alone(t) for name, t in tensors.items()})


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the host in memory that it shares with none, as safetensors wants it."""
    host = tensor.detach().cpu().contiguous()
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def from_bytes(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file on the CPU.

    The library checks that they lie side by side and fill the file.

    Raises:
        CheckpointError: no such file, or other types than a checkpoint has.
    """
    if int.from_bytes(content[:8], "little") > MAX_HEADER:
        raise CheckpointError(f"{where}: its header is longer than any header")
    try:
        tensors = load(content)
    except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: not readable as safetensors ({error})") from None
    for name, tensor in tensors.items():
        is_bool = tensor.dtype == torch.bool
        if tensor.dtype not in DTYPES or (is_bool and (tensor.view(torch.uint8) > 1).any()):
            raise CheckpointError(f"{where}: tensor {name!r:.80} is of no type of a checkpoint")
    return tensors


def refuse_other_specs(found: Mapping[str, Spec], wanted: Mapping[str, Spec], where: str) -> None:
    """Compare what a file holds with what is needed.

    Raises:
        CheckpointError: naming the first tensor that differs, and in which way.
    """
    for name in {**wanted, **found}:
        have, want = found.get(name), wanted.get(name)
        if have != want:
            raise CheckpointError(
                f"{where}: its weights do not fit its configuration: {name!r:.80} is "
                f"{have or 'absent'}, the model has {want or 'none'}"
            )


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity in it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None
