"""JSON with one meaning per text, bounded before it is parsed."""

import json
import math
from typing import Any, NoReturn

from invformer.errors import CheckpointError

MAX_BYTES = 16 << 20
MAX_VALUES = 250_000  # a list of empty lists takes 25 times its text


def dump(value: Any) -> bytes:
    """Plain values as text that :func:`parse` reads back.

    Raises:
        TypeError, ValueError: a value is no JSON, or is not finite.
    """
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def parse(text: bytes, where: str) -> Any:
    """The value of a text.

    Args:
        text: JSON in UTF-8.
        where: what errors begin with.

    Raises:
        CheckpointError: no JSON, too much of it or too deep, a key that is given twice, a number
            that is not finite.
    """
    if len(text) > MAX_BYTES or sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CheckpointError(f"{where}: more values than a checkpoint has")
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=without_repetition,
            parse_float=finite,
            parse_constant=refuse_constant,
        )
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not the JSON of a checkpoint ({error})") from None


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a key stands in it twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def finite(text: str) -> float:
    """A number, unless it is too large to be one."""
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is not finite")
    return value


def refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are Python's additions to JSON."""
    raise ValueError(f"{name} is no JSON")
