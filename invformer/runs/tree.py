"""Nested state as plain values beside named tensors, and back.

JSON has no tuples, no keys but text and no infinities. What it lacks is written as an object with
the key ``"$"``: ``{"$": "tuple", "items": […]}``, ``{"$": "pairs", "items": [[key, value], …]}``
for a mapping with other keys, ``{"$": "float", "value": "inf"}``. Tensors lie beside the JSON,
which names them: ``{"$": "tensor", "name": …}``.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from invformer.errors import CheckpointError

TAG = "$"
MAX_DEPTH = 100
MAX_INT = 1 << 63
NON_FINITE = ("inf", "-inf", "nan")


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
    return _pack(tree, "", tensors), tensors


def unpack(plain: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """The tree that :func:`pack` was given.

    Args:
        plain: its JSON values.
        tensors: its tensors by name.
        where: what errors begin with.

    Raises:
        CheckpointError: the values are not what :func:`pack` writes, a tensor is missing, named
            twice or not named.
    """
    left = dict(tensors)
    tree = _unpack(plain, left, where, MAX_DEPTH)
    if left:
        raise CheckpointError(f"{where}: nothing refers to tensor {next(iter(left))!r}")
    return tree


def _pack(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
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
        items = [_pack(item, _join(path, index), tensors) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else {TAG: "tuple", "items": items}
    if isinstance(tree, Mapping):
        pairs = [(_key(key), _pack(v, _join(path, key), tensors)) for key, v in tree.items()]
        if all(isinstance(key, str) and key != TAG for key, _ in pairs):
            return dict(pairs)
        return {TAG: "pairs", "items": [list(pair) for pair in pairs]}
    raise TypeError(f"a checkpoint holds no {type(tree).__name__} ({path})")


def _unpack(plain: Any, tensors: dict[str, Tensor], where: str, depth: int) -> Any:
    if depth == 0:
        raise CheckpointError(f"{where}: nested too deeply")
    if isinstance(plain, list):
        return [_unpack(item, tensors, where, depth - 1) for item in plain]
    if not isinstance(plain, dict):
        return plain
    match plain:
        case {"$": "tensor", "name": str(name)} if len(plain) == 2 and name in tensors:
            return tensors.pop(name)
        case {"$": "float", "value": str(name)} if len(plain) == 2 and name in NON_FINITE:
            return float(name)
        case {"$": "tuple", "items": list(items)} if len(plain) == 2:
            return tuple(_unpack(item, tensors, where, depth - 1) for item in items)
        case {"$": "pairs", "items": list(items)} if len(plain) == 2:
            return _unpack_pairs(items, tensors, where, depth - 1)
        case {"$": tag}:
            _refuse(where, f"no meaning is known for {tag!r:.40}, or its tensor is missing")
    return {key: _unpack(value, tensors, where, depth - 1) for key, value in plain.items()}


def _unpack_pairs(items: list, tensors: dict[str, Tensor], where: str, depth: int) -> dict:
    found = {}
    for item in items:
        match item:
            case [str() | int() as key, value] if key not in found and not isinstance(key, bool):
                found[key] = _unpack(value, tensors, where, depth)
            case _:
                _refuse(where, "a mapping is not made of keys with one value each")
    return found


def _key(key: Any) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(f"a checkpoint has no keys of {type(key).__name__}")
    return key


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _refuse(where: str, why: str) -> NoReturn:
    raise CheckpointError(f"{where}: {why}")
