"""The normaliser inside layers: a bound on ‖W‖₂ and the leading singular pair, once per step.

It is a function of W alone, in working precision: above ‖W‖₂ in practice, with a margin for the
rounding met there, and not proven; :func:`.spectral_norm.spectral_norm_bound` proves. The Gram
matrix G = WᵀW (or WWᵀ, the smaller), scaled to trace one, is squared K − 1 times, and the largest
eigenvalue of the last iterate is bounded (Delattre et al. 2023, arXiv 2305.16173). Matrix products
only: nothing waits for the host. On a CPU compiled code does the same, one matrix at a time.
"""

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.kernels import native_normaliser
from invformer.numerics.precision import has_answer_at_hand, without_autocast
from invformer.numerics.spectral_norm import check_matrix, tall_side, unit

# Relative margin that lifts the normaliser above the rounding of its float32 Gram matrices.
NORMALISER_MARGIN = 1e-5
# A Gram matrix of trace one, size r, has λ₁ ≥ 1/r, of norm one λ₁ ≥ r⁻¹ᐟ²: two squarings later,
# or three, λ₁ ≥ r⁻⁴, and even its square is far from underflow in float32.
RESCALE_EVERY = 3
# Gram matrices whose trace is within these are formed from W as it is; others from W scaled.
LEAST_TRACE, LARGEST_TRACE = 1e-20, 1e20

Normalisation = tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]


def gram_normaliser(weight: Float[Tensor, "*batch m n"], num_steps: int = 8) -> Normalisation:
    """(σ̄, u, v): a bound on ‖W‖₂ in working precision, and the leading singular pair.

    Stateless and deterministic: what a differentiable normaliser needs once per optimiser step.
    σ̄ is above ‖W‖₂ by 1e-5 of its size plus the excess of Gram iteration, up to a factor
    min(m, n)^{2^{−K−1}} in a cluster. With a gap after σ₁ u and v are its singular vectors, in a
    cluster some unit vectors of the cluster; u is the normalised image of v, or v that of u.

    Args:
        weight: float32 or float64; half precision is computed in float32, with a margin of its eps.
        num_steps: K ≥ 1.

    Returns:
        σ̄ (never zero, so that W/σ̄ is defined for W = 0), u and v, in the dtype of ``weight``. For a
        zero matrix u and v are zero.
    """
    (found,) = gram_normalisers([weight], num_steps)
    return found


@torch.no_grad()
def gram_normalisers(weights: Sequence[Tensor], num_steps: int = 8) -> list[Normalisation]:
    """:func:`gram_normaliser` of several, those with Gram matrices of one size at once."""
    by_gram: dict[Hashable, list[int]] = {}
    for index, weight in enumerate(weights):
        check_matrix(weight, num_steps)
        key = (min(weight.shape[-2:]), weight.dtype, weight.device)
        by_gram.setdefault(key, []).append(index)
    found: dict[int, Normalisation] = {}
    for indices in by_gram.values():
        group = _normalise_together([weights[index] for index in indices], num_steps)
        found.update(zip(indices, group, strict=True))
    return [found[index] for index in range(len(weights))]


def _normalise_together(weights: list[Tensor], num_steps: int) -> list[Normalisation]:
    """All of one dtype, device and size of Gram matrix."""
    dtype, product_dtype = weights[0].dtype, _product_dtype(weights[0])
    margin = max(NORMALISER_MARGIN, torch.finfo(dtype).eps)
    tall = [tall_side(w.to(product_dtype)) for w in weights]
    tall = [w.reshape(-1, *w.shape[-2:]) for w in tall]
    with without_autocast(weights[0].device):
        log_norms, rights, lefts = _log_norms(tall, num_steps)
        bounds = log_norms.exp() * (1 + margin)
        bounds = bounds.to(product_dtype).clamp(min=torch.finfo(dtype).tiny)
        counts = [len(w) for w in tall]
        parts = (bounds.to(dtype).split(counts), rights.to(dtype).split(counts), lefts)
        return [
            _as_shaped(weight, bound, right, left.to(dtype))
            for weight, bound, right, left in zip(weights, *parts, strict=True)
        ]


def _log_norms(tall: list[Tensor], num_steps: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """log of a bound on ‖W‖₂ and the right vectors of all matrices, left vectors of each weight."""
    matrices = [w for batch in tall for w in batch]
    if native_normaliser.can_take(matrices):
        log_norms, rights, found = native_normaliser.squarings(
            matrices, num_steps - 1, RESCALE_EVERY
        )
        lefts = iter(found)
        return log_norms, rights, [torch.stack([next(lefts) for _ in w]) for w in tall]
    tall, grams, log_scale = _grams_of_trace_one(tall)
    log_bound, power = _squared(grams, num_steps - 1)
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    rights = unit(torch.take_along_dim(power, column, dim=-1).squeeze(-1))
    per_weight = rights.unsqueeze(-1).split([len(w) for w in tall])
    lefts = [unit((w @ v).squeeze(-1)) for w, v in zip(tall, per_weight, strict=True)]
    return log_bound / 2 + log_scale, rights, lefts


def _as_shaped(weight: Tensor, bound: Tensor, right: Tensor, left: Tensor) -> Normalisation:
    """(σ̄, u, v) with the batch dimensions of the weight; its tall side had ``right`` for v."""
    batch, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    u, v = (left, right) if rows >= columns else (right, left)
    return bound.view(batch), u.view(*batch, rows), v.view(*batch, columns)


def _grams_of_trace_one(tall: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """The matrices up to scale, their WᵀW/‖W‖_F², and log ‖W‖_F.

    What leaves the range of the format when it is squared is scaled first; so is everything on a
    device that would have to be asked.
    """
    if has_answer_at_hand(tall[0]):
        grams = torch.cat([w.mT @ w for w in tall])
        traces = _traces(grams)
        if all(LEAST_TRACE < trace < LARGEST_TRACE for trace in traces.tolist()):
            return tall, grams.div_(traces[:, None, None]), traces.log() / 2
    tiny = torch.finfo(tall[0].dtype).tiny
    scales = [w.abs().amax((-2, -1)).clamp(min=tiny) for w in tall]
    tall = [w / s[:, None, None] for w, s in zip(tall, scales, strict=True)]
    grams = torch.cat([w.mT @ w for w in tall])
    traces = _traces(grams).clamp(min=tiny)
    return tall, grams.div_(traces[:, None, None]), torch.cat(scales).log() + traces.log() / 2


def _traces(m: Tensor) -> Tensor:
    """tr M of every matrix."""
    return m.diagonal(dim1=-2, dim2=-1).sum(-1)


def _squared(g: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """log of a bound on λ₁ of semidefinite G (overwritten), and G^{2^K} up to scale."""
    tiny = torch.finfo(g.dtype).tiny
    log_bound = g.new_zeros(len(g))
    other = torch.empty_like(g)
    for step in range(num_steps):
        if step % RESCALE_EVERY == RESCALE_EVERY - 1:
            scale = torch.linalg.matrix_norm(g).clamp_(min=tiny)
            log_bound.add_(scale.log(), alpha=2.0**-step)
            g.div_(scale[:, None, None])
        torch.bmm(g.mT, g, out=other)
        g, other = other, g
    largest = _wolkowicz_styan(g).clamp(min=tiny)
    return log_bound + largest.log() / 2**num_steps, g


def _wolkowicz_styan(m: Tensor) -> Tensor:
    """λ₁ ≤ t/r + √((r − 1)/r · (f − t²/r)) of semidefinite M, t = tr M, f = ‖M‖_F², size r.

    Hardly above ‖M‖_F, and equal to λ₁ if the other eigenvalues are equal (Wolkowicz & Styan 1980),
    except for rounding, which in a cluster may cancel all of the difference.
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
