"""Values and tensors as bytes and back: JSON beside safetensors, nothing that could run.

JSON has no tuples, no keys but text and no infinities. They are written as objects with the key
``"$"``: ``{"$": "tuple", "items": […]}``, ``{"$": "pairs", "items": [[key, value], …]}`` for a
mapping with other keys, ``{"$": "float", "value": "inf"}``. Tensors lie in a safetensors file,
which the JSON refers to: ``{"$": "tensor", "name": …}``.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, contiguous_format

from invformer.errors import CheckpointError

TAG = "$"


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Type and shape of every tensor, such as ``float32[3, 4]``."""
    return {n: f"{str(t.dtype)[len('torch.') :]}{list(t.shape)}" for n, t in tensors.items()}


def dump(value: Any) -> bytes:
    """Plain values as JSON."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def parse(text: bytes, where: str) -> Any:
    """The value of a JSON text; raises CheckpointError if it is none."""
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not the JSON of a checkpoint ({error})") from None


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON values and the tensors they name; a tensor that occurs twice is kept twice.

    Args:
        tree: None, bools, integers, floats, text and dense tensors in dicts (with keys of text or
            integers), lists and tuples.

    Raises:
        TypeError: anything else.
    """
    tensors: dict[str, Tensor] = {}

    def packed(tree: Any, path: str) -> Any:
        match tree:
            case float() if not math.isfinite(tree):
                return {TAG: "float", "value": repr(float(tree))}
            case None | bool() | int() | float() | str():
                return tree
            case Tensor():
                while path in tensors:  # keys may hold the separator
                    path += "'"
                tensors[path] = tree
                return {TAG: "tensor", "name": path}
            case list() | tuple():
                items = [packed(item, f"{path}/{n}".lstrip("/")) for n, item in enumerate(tree)]
                return items if isinstance(tree, list) else {TAG: "tuple", "items": items}
            case Mapping() if all(isinstance(key, str | int) for key in tree):
                found = {k: packed(item, f"{path}/{k}".lstrip("/")) for k, item in tree.items()}
                if all(isinstance(key, str) and key != TAG for key in found):
                    return found
                return {TAG: "pairs", "items": [[key, item] for key, item in found.items()]}
        raise TypeError(f"a checkpoint holds no {type(tree).__name__} ({path})")

    return packed(tree, ""), tensors


def unpack(plain: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """The tree that :func:`pack` was given; raises CheckpointError if these are not its values."""

    def unpacked(plain: Any) -> Any:
        match plain:
            case list():
                return [unpacked(item) for item in plain]
            case {"$": "tensor", "name": name}:
                return tensors[name]
            case {"$": "float", "value": name}:
                return float(name)
            case {"$": "tuple", "items": items}:
                return tuple(unpacked(item) for item in items)
            case {"$": "pairs", "items": items}:
                return {key: unpacked(value) for key, value in items}
            case {"$": tag}:
                raise ValueError(f"no meaning is known for {tag!r:.40}")
            case dict():
                return {key: unpacked(value) for key, value in plain.items()}
        return plain

    try:
        return unpacked(plain)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{where}: not the state of a run ({reason:.80})") from None


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, the same for the same tensors."""
    copies = {  # on the host, in memory that no two of them share
        name: tensor.detach().to("cpu", copy=True, memory_format=contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(copies)


def from_bytes(content: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file on the CPU; raises CheckpointError if it is none."""
    try:
        return load(content)
    except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: not readable as safetensors ({error})") from None


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity in it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None
