"""Steps of power iteration for all branches of a stack by compiled code.

``cpp/estimate.cpp`` says how. One call takes the place of a hundred operations on small tensors.
"""

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from invformer.kernels import native
from invformer.kernels.native import pointer

# What a branch consists of: of the C++ ``Branch``, in its order.
TENSORS = (
    *("w", "b", "v", "scale", "shift", "inverse", "log_scale", "norm_scale", "norm_shift"),
    *("biases", "temperatures", "left", "lengths", "estimate", "turn"),
)
NUMBERS = ("inner", "outer", "kernel", "activation", "heads", "bias_stride", "late", "at_once")


class _Branch(ctypes.Structure):
    """A residual layer, the scaling that follows it, and the vectors of its iteration."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("radius", ctypes.c_double),
    ]


class _Call(ctypes.Structure):
    """What all branches share."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("sequences", "tokens", "width", "branches", "steps")),
        ("diagonal", ctypes.c_bool),
        ("entries", ctypes.c_bool),
        ("threads", ctypes.c_int),
    ]


def advance(
    branches: Sequence[Mapping[str, Tensor | float]],
    x: Tensor,
    num_steps: int,
    diagonal: bool,
    entries: bool,
    threads: int,
) -> None:
    """Move the vectors of every branch, and write what it gains into its ``estimate``.

    Args:
        branches: in the order they act, what ``_Branch`` names; a part that a branch does not have
            is left out. Tensors are of the format of x and without gaps.
        x: the input of the first branch, (sequences, N, D).
        num_steps: of the iteration.
        diagonal: whether only the diagonal blocks ∂f_i/∂x_i are meant.
        entries: whether the norm is entry_max; otherwise it is token_max.
        threads: at most.
    """
    each = [
        _Branch(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in branch.items()})
        for branch in branches
    ]
    call = _Call(*x.shape, len(each), num_steps, diagonal, entries, min(threads, len(each)))
    native.call("advance", x.dtype, (_Branch * len(each))(*each), pointer(x), call)
