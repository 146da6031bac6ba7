"""Matrices of singular values near one by compiled code, one matrix at a time in a core's cache.

``cpp/orthogonal.cpp`` says how. Of symmetric products it computes half, and nothing depends on the
number of threads or on the other matrices.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from invformer.kernels import native, native_normaliser
from invformer.numerics.spectral_norm import tall_side


class _Quintic(ctypes.Structure):
    """a, b and c."""

    _fields_ = [(name, ctypes.c_double) for name in "abc"]


def can_take(batches: Sequence[Tensor]) -> bool:
    """Whether there is compiled code for these matrices, and they are work for the threads."""
    formats = {b.dtype for b in batches}
    plain = len(formats) == 1 and formats <= {torch.float32, torch.float64}
    return plain and native_normaliser.can_take([m for batch in batches for m in batch])


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
            "orthogonalise", results[0].dtype, *native_normaliser.group(*zip(*pairs, strict=True)),
            _Quintic(*quintic), ctypes.c_int(num_steps), ctypes.c_double(gain),
            native.threads_for(len(pairs)),
        )  # fmt: skip
    return results
