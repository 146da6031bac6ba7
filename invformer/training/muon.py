"""Muon: steps of equal size in every direction of a weight matrix, all matrices of a shape at once.

torch.optim.Muon orthogonalises one matrix after the other, in bfloat16, and does not know that the
heads of an attention are one matrix: a step of a small model takes one core five times as long as
the batched products here, and longer than the model itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.kernels import native_matrices
from invformer.numerics.private import foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sub_

# The quintic that pulls singular values towards one, a few of them quickly (Jordan et al. 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
MOMENTUM = 0.95
# An update of rms 0.2, about that of AdamW (Liu et al. 2025).
UPDATE_RMS = 0.2


@torch.no_grad()
def update(group: dict[str, Any], memory: Mapping[Tensor, dict[str, Any]]) -> None:
    """W ← (1 − ηλ)W − 0.2 η √max(m, n) · UVᵀ, where UΣVᵀ is the Nesterov momentum of the gradient.

    UVᵀ is what :func:`orthogonalised` makes of it: all its singular values are near one. Source:
    Jordan et al. 2024, *Muon*; the size of a step after Liu et al. 2025, arXiv 2502.16982.

    Args:
        group: ``params``, which are matrices or stacks of them (:func:`as_matrices`); ``lr``, η;
            ``weight_decay``, λ; ``momentum``; and ``parts``, how many matrices of equal height the
            matrices consist of, such as three for queries, keys and values.
        memory: of each parameter, where its momentum is kept.
    """
    params = [p for p in group["params"] if p.grad is not None]
    if not params:
        return
    gradients, averages = [p.grad for p in params], [average_of(p, memory[p]) for p in params]
    foreach_lerp_(averages, gradients, 1 - group["momentum"])
    momenta = foreach_lerp(gradients, averages, group["momentum"])  # Nesterov's
    matrices = [as_matrices(m, group["parts"]) for m in momenta]
    directions = [
        as_parameter(d, p.shape)
        for d, p in zip(orthogonalised_together(matrices), params, strict=True)
    ]
    foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    foreach_sub_(params, directions, alpha=group["lr"])


def average_of(p: Tensor, memory: dict[str, Any]) -> Tensor:
    """The average of a parameter's gradients; zero at first."""
    if not memory:
        memory["momentum_buffer"] = torch.zeros_like(p)
    return memory["momentum_buffer"]


def as_matrices(p: Tensor, parts: int = 1) -> Float[Tensor, "matrices rows columns"]:
    """The matrices that a parameter consists of.

    The ``parts`` of a matrix lie below each other. Of a stack (…, H, m, n) the H matrices of the
    heads are one, (m, H n) side by side or (H m, n) if m < n, because orthonormal rows or columns
    of the whole are orthonormal in every head; whatever comes before H are matrices apart.
    """
    if p.dim() == 2:
        return p.unflatten(0, (parts, -1))
    heads = p.flatten(0, -4) if p.dim() > 3 else p.unsqueeze(0)
    return heads.transpose(1, 2).flatten(2) if joins_columns(p.shape) else heads.flatten(1, 2)


def as_parameter(matrices: Float[Tensor, "matrices rows columns"], shape: torch.Size) -> Tensor:
    """The inverse of :func:`as_matrices`, for a parameter of this shape."""
    if len(shape) > 2 and joins_columns(shape):
        matrices = matrices.unflatten(2, (-1, shape[-1])).transpose(1, 2)
    return matrices.reshape(shape)


def joins_columns(shape: torch.Size) -> bool:
    """Whether the matrices of a stack are joined by columns."""
    return shape[-2] >= shape[-1]


def orthogonalised_together(batches: list[Tensor]) -> list[Tensor]:
    """0.2 √max(m, n) times :func:`orthogonalised` of every matrix, those of one shape at once.

    In compiled code, if there is any, one matrix after the other.
    """
    if native_matrices.can_take([matrix for batch in batches for matrix in batch]):
        return native_matrices.orthogonalised(batches, QUINTIC, NUM_STEPS, UPDATE_RMS)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, batch in enumerate(batches):
        by_shape.setdefault(tuple(sorted(batch.shape[1:])), []).append(index)
    found: dict[int, Tensor] = {}
    for (_, longer), indices in by_shape.items():
        wide = [b if b.shape[1] <= b.shape[2] else b.mT for b in (batches[i] for i in indices)]
        directions = orthogonalised(torch.cat(wide)) * (UPDATE_RMS * longer**0.5)
        for index, d in zip(indices, directions.split([len(b) for b in wide]), strict=True):
            found[index] = d if d.shape == batches[index].shape else d.mT
    return [found[index] for index in range(len(batches))]


def orthogonalised(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows columns"]:
    """About UVᵀ of X = UΣVᵀ, by five steps X ← aX + b(XXᵀ)X + c(XXᵀ)²X from X/‖X‖_F.

    Singular values above 2 % of the norm end between 0.7 and 1.2; zero stays zero. In bfloat16 on
    a GPU, in float32 or more elsewhere.

    Source: Jordan et al. 2024.
    """
    a, b, c = QUINTIC
    dtype = torch.bfloat16 if x.is_cuda else torch.promote_types(x.dtype, torch.float32)
    tiny = torch.finfo(torch.float32).tiny
    scaled = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=tiny)
    y = scaled.to(dtype).reshape(-1, *x.shape[-2:])
    for _ in range(NUM_STEPS):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return y.view(x.shape).to(x.dtype)
