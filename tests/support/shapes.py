"""What --check-shapes checks: tensor shapes and dtypes, at every call, and no other annotation."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def shapes_only(function: Callable) -> Callable:
    """beartype for the annotations that speak of shapes.

    The others stay pyright's business: tests hand over wrong words and ints for floats on purpose,
    and protocols cannot be checked by isinstance.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if has_shape(hint)}
    return beartype(function)


def has_shape(hint: Any) -> bool:
    """Whether a type hint contains a jaxtyping array."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(has_shape(part) for part in get_args(hint))
