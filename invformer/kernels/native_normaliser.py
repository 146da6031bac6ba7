"""Gram matrices and their squarings by compiled code, one matrix at a time in a core's cache.

``cpp/normaliser.cpp`` says how. Of symmetric products it computes half, and nothing depends on the
number of threads or on the other matrices.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from invformer.kernels import native
from invformer.kernels.native import pointer


class _Weight(ctypes.Structure):
    """A tall matrix (m, n), by its strides, and where its left vector goes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("left", ctypes.c_void_p),
    ]


def can_take(weights: Sequence[Tensor]) -> bool:
    """Whether there is compiled code for these matrices, and they are work for the threads."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False  # no numbers to look at
    in_one_piece = all(
        w.device.type == "cpu" and (w.is_contiguous() or w.mT.is_contiguous()) for w in weights
    )
    return in_one_piece and native.occupies_threads(len(weights)) and native.is_available()


def squarings(
    weights: Sequence[Tensor], times: int, rescale_every: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log of a bound on ‖W‖₂ (B,) in float64, v (B, n), and u of every matrix.

    Zero has the bound 0 and the vectors 0; what is no number has neither.

    Args:
        weights: tall matrices (m, n) of one n, or the transposes of wide ones, each in one piece.
        times: how often a Gram matrix is squared.
        rescale_every: squarings from one rescaling to the next.
    """
    first, count = weights[0], len(weights)
    log_norms, rights = (
        torch.empty(count, dtype=torch.float64),
        first.new_empty(count, first.shape[-1]),
    )
    lefts = [w.new_empty(len(w)) for w in weights]
    each = [
        _Weight(w.data_ptr(), len(w), *w.stride(), left.data_ptr())
        for w, left in zip(weights, lefts, strict=True)
    ]
    native.call(
        "squarings", first.dtype, (_Weight * count)(*each), ctypes.c_int64(count),
        ctypes.c_int64(first.shape[-1]), ctypes.c_int(times), ctypes.c_int(rescale_every),
        pointer(log_norms), pointer(rights), native.threads_for(count),
    )  # fmt: skip
    return log_norms, rights, lefts
