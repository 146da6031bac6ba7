"""Compiled code for the normaliser and for Muon, one matrix at a time in a core's cache.

``cpp/normaliser.cpp`` and ``cpp/orthogonal.cpp`` say how. Of symmetric products they compute half,
and nothing depends on the number of threads or on the other matrices.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from invformer.kernels import native
from invformer.kernels.native import pointer
from invformer.numerics.spectral_norm import tall_side


class _Weight(ctypes.Structure):
    """A tall matrix (m, n), by its strides, and where its left vector or its like goes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "row", "column")),
        ("left", ctypes.c_void_p),
    ]


class KrylovSpace(NamedTuple):
    """Krylov spaces of symmetric matrices G (B, n, n).

    Attributes:
        vectors: unit vectors v_s, orthogonal to the two before them (B, S, n).
        alongs: α_s = v_sᵀ G v_s (B, S).
        besides: β_s, how long what is new in G v_s is (B, S).
    """

    vectors: Tensor
    alongs: Tensor
    besides: Tensor


def can_take(weights: Sequence[Tensor]) -> bool:
    """True if there is compiled code for these matrices, and they occupy the threads."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False  # their tensors have no memory
    alike = {w.dtype for w in weights} in ({torch.float32}, {torch.float64})
    whole = all(
        w.device.type == "cpu" and (w.is_contiguous() or w.mT.is_contiguous()) for w in weights
    )
    return alike and whole and native.occupies_threads(len(weights)) and native.is_available()


def squarings(
    weights: Sequence[Tensor], times: int, rescale_every: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log of a bound on ‖W‖₂ (B,) in float64, v (B, n), and u of every matrix.

    Its Gram matrix is squared so many ``times``. Matrices are tall, (m, n) of one n, or the
    transposes of wide ones, each in one piece. A zero matrix has the bound 0 and zero vectors; of a
    matrix with NaN all of them are NaN.
    """
    first, count, n = weights[0], len(weights), weights[0].shape[-1]
    log_norms, rights = torch.empty(count, dtype=torch.float64), first.new_empty(count, n)
    lefts = [w.new_empty(len(w)) for w in weights]
    native.call(
        "squarings", first.dtype, *group(weights, [left.data_ptr() for left in lefts]),
        ctypes.c_int(times), ctypes.c_int(rescale_every),
        pointer(log_norms), pointer(rights), native.threads_for(count),
    )  # fmt: skip
    return log_norms, rights, lefts


def krylov(
    weights: Sequence[Tensor], num_vectors: int, start: Tensor
) -> tuple[Tensor, Tensor, KrylovSpace]:
    """G = WᵀW/‖W‖_F² (B, n, n), log ‖W‖_F (B,) in float64, and the Krylov spaces from G ``start``.

    Matrices are as for :func:`squarings`. If one is zero or not finite, log ‖W‖_F is not finite,
    and its other results are not written.
    """
    first, count, n = weights[0], len(weights), weights[0].shape[-1]
    grams, log_scale = first.new_empty(count, n, n), torch.empty(count, dtype=torch.float64)
    coefficients = (first.new_empty(count, num_vectors) for _ in range(2))
    space = KrylovSpace(first.new_empty(count, num_vectors, n), *coefficients)
    native.call(
        "krylov", first.dtype, *group(weights, [0] * count), ctypes.c_int(num_vectors),
        pointer(start), pointer(grams), pointer(log_scale), *map(pointer, space),
        native.threads_for(count),
    )  # fmt: skip
    return grams, log_scale, space


def orthogonalised(
    batches: Sequence[Tensor], quintic: tuple[float, float, float], num_steps: int, gain: float
) -> list[Tensor]:
    """gain √max(m, n) X of every matrix, by steps X ← aX + b(XXᵀ)X + c(XXᵀ)²X from X/‖X‖_F.

    Every batch (B, m, n) lies in one piece; a, b and c are the ``quintic``.
    """
    results = [torch.empty_like(batch) for batch in batches]
    by_width: dict[int, list[tuple[Tensor, int]]] = {}
    for batch, result in zip(batches, results, strict=True):
        for x, y in zip(tall_side(batch), result, strict=True):
            by_width.setdefault(x.shape[-1], []).append((x, y.data_ptr()))
    for pairs in by_width.values():
        native.call(
            "orthogonalise", results[0].dtype, *group(*zip(*pairs, strict=True)),
            *map(ctypes.c_double, quintic), ctypes.c_int(num_steps), ctypes.c_double(gain),
            native.threads_for(len(pairs)),
        )  # fmt: skip
    return results


def group(
    weights: Sequence[Tensor], lefts: Sequence[int]
) -> tuple[ctypes.Array, ctypes.c_int64, ctypes.c_int64]:
    """Tall matrices of one n and a pointer for each, as compiled functions take them."""
    each = [
        _Weight(w.data_ptr(), len(w), *w.stride(), left)
        for w, left in zip(weights, lefts, strict=True)
    ]
    n = weights[0].shape[-1]
    return (_Weight * len(each))(*each), ctypes.c_int64(len(each)), ctypes.c_int64(n)
