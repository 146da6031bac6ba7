"""The normaliser inside layers: a bound on ‖W‖₂ and the leading singular pair, once per step.

It is a function of W alone, in working precision: above ‖W‖₂ in practice, with a margin for the
rounding met there, and not proven; :func:`.spectral_norm.spectral_norm_bound` proves. Both ways to
a bound start from the Gram matrix G = WᵀW (or WWᵀ, the smaller), scaled to trace one:

* *Gram iteration* (Delattre et al. 2023, arXiv 2305.16173) squares it K − 1 times and bounds the
  largest eigenvalue of the last iterate. Matrix products only: nothing waits for the host.
* *Trial*: Lanczos finds θ ≤ λ₁(G), and a Cholesky factor of bI − G shows that b, a little above θ,
  is above λ₁. Where there is none, a larger b is tried, then Gram iteration steps in. Compiled code
  (``cpp/normaliser.cpp``) takes this way for large matrices.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.kernels import native_matrices
from invformer.numerics.precision import without_autocast
from invformer.numerics.spectral_norm import check_matrix, tall_side

# K − 1: on trained weights the bound then exceeds the norm by about 0.1 %.
NUM_SQUARINGS = 7
# Relative margin that lifts the normaliser above the rounding of its float32 Gram matrices.
NORMALISER_MARGIN = 1e-5
# A Gram matrix of trace one, size r, has λ₁ ≥ 1/r, one of norm one λ₁ ≥ r⁻¹ᐟ²: two squarings later,
# or three, λ₁ ≥ r⁻⁴, and even its square is far from underflow in float32.
RESCALE_EVERY = 3
# Gram matrices are summed over parts of so many rows: whole products would occupy half a GPU.
LONGEST_PRODUCT = 512
# From this size on a trial takes half the time of squarings or less.
TRIAL_SIZE = 128
# Krylov vectors: on matrices from training θ is then within 0.2 % of λ₁, nine times in ten.
NUM_VECTORS = 32
# b/θ − 1 is the relative residual of θ, within these.
LEAST_LIFT, LARGEST_LIFT = 1e-4, 1e-2

T = TypeVar("T")
Normalisation = tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]


@torch.no_grad()
def gram_normalisers(weights: Sequence[Tensor]) -> list[Normalisation]:
    """(σ̄, u, v) of each weight: a bound on ‖W‖₂ in working precision, the leading singular pair.

    Weights with Gram matrices of one size are computed at once. σ̄ is above ‖W‖₂ by 1e-5 of its size
    plus the excess of the method: Gram iteration's, up to a factor min(m, n)^{2^{−K−1}} in a
    cluster, or that of the trial, at most 0.5 %. With a gap after σ₁ u and v are its singular
    vectors, in a cluster some unit vectors of the cluster; one is the normalised image of the
    other. For a zero matrix they are zero, but not σ̄, so that W/σ̄ is defined.

    Weights are (*batch, m, n). Half precision is computed in float32, with a margin of its eps.

    Raises:
        ValueError: one of them is not a (batch of) floating-point matrix.
    """
    by_gram: dict[Hashable, list[int]] = {}
    for index, weight in enumerate(weights):
        check_matrix(weight)
        key = (min(weight.shape[-2:]), weight.dtype, weight.device)
        by_gram.setdefault(key, []).append(index)
    work = []
    for indices in by_gram.values():
        indices.sort(key=lambda index: weights[index].shape[-2:])
        work.append(partial(_normalise_together, [weights[index] for index in indices]))
    found: dict[int, Normalisation] = {}
    groups = _side_by_side(weights[0].device, work) if work else []
    for indices, group in zip(by_gram.values(), groups, strict=True):
        found.update(zip(indices, group, strict=True))
    return [found[index] for index in range(len(weights))]


def _side_by_side(device: torch.device, work: Sequence[Callable[[], T]]) -> list[T]:
    """The results of several functions; on a GPU each runs on a stream of its own.

    It waits for the present stream before, and is waited for after.
    """
    if device.type != "cuda":
        return [each() for each in work]
    here, found = torch.cuda.current_stream(device), []
    streams = [torch.cuda.Stream(device) for _ in work]
    for stream, each in zip(streams, work, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(each())
    for stream in streams:
        here.wait_stream(stream)
    return found


def _normalise_together(weights: list[Tensor]) -> list[Normalisation]:
    """All of one dtype, device and size of Gram matrix, in the order of their shapes."""
    dtype, product_dtype = weights[0].dtype, _product_dtype(weights[0])
    margin = max(NORMALISER_MARGIN, torch.finfo(dtype).eps)
    batches = [w.to(product_dtype).reshape(-1, *w.shape[-2:]) for w in weights]
    counts = list(map(len, batches))
    with without_autocast(weights[0].device):
        log_norms, rights, lefts = _log_norms(batches)
        bounds = log_norms.exp() * (1 + margin)
        bounds = bounds.to(product_dtype).clamp(min=torch.finfo(dtype).tiny)
        per_weight = (t.to(dtype).split(counts) for t in (bounds, rights))
        found = zip(weights, *per_weight, (left.to(dtype) for left in lefts), strict=True)
        return [_as_shaped(*one) for one in found]


def _log_norms(weights: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log of a bound on ‖W‖₂ and the right vectors of all matrices, left vectors of each weight."""
    matrices = [w for batch in weights for w in tall_side(batch)]
    if native_matrices.can_take(matrices):
        start, lifts = None, (LEAST_LIFT, LARGEST_LIFT)
        if (size := matrices[0].shape[-1]) >= TRIAL_SIZE:  # no structure, and always the same
            generator = torch.Generator().manual_seed(0)
            start = torch.randn(size, generator=generator, dtype=torch.float64).to(matrices[0])
        log_norms, rights, lefts = native_matrices.bounds(
            matrices, NUM_SQUARINGS, RESCALE_EVERY, start, NUM_VECTORS, lifts
        )
        each = iter(lefts)
        return log_norms, rights, [torch.stack([next(each) for _ in batch]) for batch in weights]
    same_shape = [list(each) for _, each in groupby(weights, key=lambda w: w.shape[-2:])]
    tall, grams, log_scale = _grams_of_trace_one([tall_side(torch.cat(w)) for w in same_shape])
    log_bound, rights = _gram_iteration(grams)
    lefts = []  # W v/‖W v‖₂
    vectors = rights.unsqueeze(-1).split(list(map(len, tall)))
    for w, v, each in zip(tall, vectors, same_shape, strict=True):
        lefts += _unit((w @ v).squeeze(-1)).split(list(map(len, each)))
    return log_bound / 2 + log_scale, rights, lefts


def _as_shaped(weight: Tensor, bound: Tensor, right: Tensor, left: Tensor) -> Normalisation:
    """(σ̄, u, v) with the batch dimensions of the weight; its tall side had ``right`` for v."""
    batch, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    u, v = (left, right) if rows >= columns else (right, left)
    return bound.view(batch), u.view(*batch, rows), v.view(*batch, columns)


def _grams_of_trace_one(tall: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """The matrices scaled so that squares are in range, their WᵀW/‖W‖_F², and log ‖W‖_F."""
    tiny, size, counts = torch.finfo(tall[0].dtype).tiny, tall[0].shape[-1], [len(w) for w in tall]
    scales = [torch.linalg.vector_norm(w, math.inf, (-2, -1)).clamp(min=tiny) for w in tall]
    tall = [w / s[:, None, None] for w, s in zip(tall, scales, strict=True)]
    grams = tall[0].new_empty(sum(counts), size, size)
    for gram, w in zip(grams.split(counts), tall, strict=True):
        first, *others = w.split(LONGEST_PRODUCT, dim=-2)
        torch.bmm(first.mT, first, out=gram)
        for part in others:
            gram.baddbmm_(part.mT, part)
    traces = _traces(grams).clamp(min=tiny)
    return tall, grams.div_(traces[:, None, None]), torch.cat(scales).log() + traces.log() / 2


def _traces(m: Tensor) -> Tensor:
    """tr M of every matrix."""
    return m.diagonal(dim1=-2, dim2=-1).sum(-1)


def _gram_iteration(g: Tensor) -> tuple[Tensor, Tensor]:
    """log of a bound on λ₁ of semidefinite G (overwritten), and a column of the last iterate."""
    tiny = torch.finfo(g.dtype).tiny
    log_bound = g.new_zeros(len(g))
    other = torch.empty_like(g)
    for step in range(NUM_SQUARINGS):
        if step % RESCALE_EVERY == RESCALE_EVERY - 1:
            scale = torch.linalg.matrix_norm(g).clamp_(min=tiny)
            log_bound.add_(scale.log(), alpha=2.0**-step)
            g.div_(scale[:, None, None])
        torch.bmm(g.mT, g, out=other)
        g, other = other, g
    log_bound = log_bound + _wolkowicz_styan(g).clamp(min=tiny).log() / 2**NUM_SQUARINGS
    column = g.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    return log_bound, _unit(torch.take_along_dim(g, column, dim=-1).squeeze(-1))


def _wolkowicz_styan(m: Tensor) -> Tensor:
    """λ₁ ≤ t/r + √((r − 1)/r · (f − t²/r)) of semidefinite M, t = tr M, f = ‖M‖_F², size r.

    Hardly above ‖M‖_F, and equal to λ₁ if the other eigenvalues are equal (Wolkowicz & Styan 1980),
    but for what rounding may have cancelled: in a cluster all of the difference can be lost.
    """
    size = m.shape[-1]
    mean = _traces(m) / size
    squares = m.square().sum(-1).sum(-1)
    lost = 8 * torch.finfo(m.dtype).eps * squares if size > 1 else 0
    variance = (squares - size * mean.square()).clamp(min=0) + lost
    return mean + ((size - 1) / size * variance).sqrt()


def _product_dtype(weight: Tensor) -> torch.dtype:
    """float32 or more; float64 where the backend would multiply float32 in TF32 or bfloat16."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(weight.device.type)
    if backend is not None and backend.matmul.fp32_precision in ("tf32", "bf16"):
        return torch.float64
    return torch.promote_types(weight.dtype, torch.float32)


def _unit(x: Tensor) -> Tensor:
    """x/‖x‖₂ along the last dimension; zero stays zero."""
    return F.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)
