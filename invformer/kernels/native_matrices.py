"""Compiled code for the normaliser and for Muon, one matrix at a time in a core's cache.

``cpp/normaliser.cpp`` and ``cpp/orthogonal.cpp`` say how. Of symmetric products they compute half,
and nothing depends on the number of threads or on the other matrices.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from invformer.kernels import native
from invformer.kernels.native import pointer
from invformer.numerics.private import is_transformed
from invformer.numerics.spectral_norm import tall_side


class _Weight(ctypes.Structure):
    """A tall matrix (m, n), by its strides, and where its left vector or its like goes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "row", "column")),
        ("left", ctypes.c_void_p),
    ]


def can_take(weights: Sequence[Tensor]) -> bool:
    """True if there is compiled code for these matrices, and they occupy the threads."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False  # which would keep the result as a constant
    if is_transformed():
        return False
    alike = len({w.dtype for w in weights}) == 1 and weights[0].dtype in native.FORMATS
    whole = all(
        native.is_readable(w) and w.numel() and (w.is_contiguous() or w.mT.is_contiguous())
        for w in weights
    )
    return alike and whole and native.occupies_threads(len(weights)) and native.is_available()


def bounds(
    weights: Sequence[Tensor],
    squarings: int,
    rescale_every: int,
    start: Tensor | None,
    num_vectors: int,
    lifts: tuple[float, float],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log of a bound on ‖W‖₂ (B,) in float64, v (B, n), and u of every matrix.

    By trial from this ``start``, if there is one; where that fails, and without, by ``squarings``
    of its Gram matrix. Matrices are tall, (m, n) of one n, or the transposes of wide ones, each in
    one piece. A zero matrix has the bound 0 and zero vectors; of a matrix with NaN all of them are
    NaN.
    """
    first, count, n = weights[0], len(weights), weights[0].shape[-1]
    log_norms, rights = torch.empty(count, dtype=torch.float64), first.new_empty(count, n)
    lefts = [w.new_empty(len(w)) for w in weights]
    native.call(
        "normalise", first.dtype, *group(weights, lefts),
        *map(ctypes.c_int, (squarings, rescale_every, 0 if start is None else num_vectors)),
        *map(ctypes.c_double, lifts),
        None if start is None else pointer(start, n, dtype=first.dtype),
        pointer(log_norms, count, dtype=torch.float64),
        pointer(rights, count, n, dtype=first.dtype), native.threads_for(count),
    )  # fmt: skip
    return log_norms, rights, lefts


def orthogonalised(
    batches: Sequence[Tensor], quintic: tuple[float, float, float], num_steps: int, gain: float
) -> list[Tensor]:
    """gain √max(m, n) X of every matrix, by steps X ← aX + b(XXᵀ)X + c(XXᵀ)²X from X/‖X‖_F.

    a, b and c are the ``quintic``.
    """
    batches = [batch.contiguous() for batch in batches]
    results = [b.new_empty_strided(b.shape, b.stride()) for b in batches]
    by_width: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for batch, result in zip(batches, results, strict=True):
        for x, y in zip(tall_side(batch), tall_side(result), strict=True):
            by_width.setdefault(x.shape[-1], []).append((x, y))
    for pairs in by_width.values():
        native.call(
            "orthogonalise", results[0].dtype, *group(*zip(*pairs, strict=True)),
            *map(ctypes.c_double, quintic), ctypes.c_int(num_steps), ctypes.c_double(gain),
            native.threads_for(len(pairs)),
        )  # fmt: skip
    return results


def group(
    weights: Sequence[Tensor], lefts: Sequence[Tensor]
) -> tuple[ctypes.Array, ctypes.c_int64, ctypes.c_int64]:
    """Tall matrices of one n, and for each a vector, or a matrix that lies as it does.

    Compiled functions take them so, each in one piece.
    """
    n, dtype = weights[0].shape[-1], weights[0].dtype
    each = []
    for w, left in zip(weights, lefts, strict=True):
        native.require(w, (len(w), n), dtype)
        if left.ndim > 1 and left.stride() != w.stride():
            raise ValueError(
                f"compiled code takes matrices that lie alike, not {w.stride()} and {left.stride()}"
            )
        each.append(_Weight(w.data_ptr(), len(w), *w.stride(), left.data_ptr()))
    return (_Weight * len(each))(*each), ctypes.c_int64(len(each)), ctypes.c_int64(n)
