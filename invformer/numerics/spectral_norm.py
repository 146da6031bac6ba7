"""Spectral norms ‖W‖₂ = σ_max(W): a certified bound, a normaliser's bound, an estimate.

| function | precision | stands to ‖W‖₂ |
|---|---|---|
| :func:`spectral_norm_bound` | float64 | proven ≥, rounding included |
| :func:`gram_normaliser` | float32 | ≥ in practice, not proven |
| :func:`power_iteration` | that of W | ≤, an estimate from below |

Gram iteration (Delattre et al. 2023, arXiv 2305.16173) squares the singular values K times,
G_{k+1} = G_kᵀG_k, and bounds the last iterate; a factor c there is a factor c^{2^{−K}} on ‖W‖₂.
What remains is the cost of a cluster at the top of the spectrum, up to 1 %, and clusters are what
training with a spectral normaliser produces. The certificate therefore also tries a number b just
above the computed λ₁(WᵀW), with a Cholesky factor R of bI − WᵀW. RᵀR is semidefinite for any R:

    bI − WᵀW = RᵀR + E   ⟹   ‖W‖₂² ≤ b + ‖E‖₂,

and E, the residual of the factorisation, is of the size of rounding.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.rounding import UNIT_ROUNDOFF

# Relative margin that lifts the normaliser above the rounding of its float32 Gram matrices.
NORMALISER_MARGIN = 1e-5
# A Gram matrix of trace one, size r, has λ₁ ≥ 1/r, one of norm one λ₁ ≥ r⁻¹ᐟ²: two squarings later,
# or three, λ₁ ≥ r⁻⁴ is still far from underflow in float32.
RESCALE_EVERY = 3
# b is this much above the computed λ₁, per row: room for the factorisation's own rounding.
RESIDUAL_SHIFT = 1e-12
# Scales are powers of two within these exponents: they and their inverses are normal numbers.
LARGEST_EXPONENT = 1022


def spectral_norm_bound(
    weight: Float[Tensor, "*batch m n"], num_steps: int = 8
) -> Float[Tensor, "*batch"]:
    """A proven upper bound on ‖W‖₂ of every matrix: the smaller of two, both in float64.

        ‖G‖₂² ≤ ‖fl(GᵀG)‖₂ + γ ‖G‖_F²   (Gram iteration),    γ = r u/(1 − r u), r rows, u = 2⁻⁵³
        ‖G‖₂² ≤ b + ‖fl(bI − GᵀG − RᵀR)‖_F + rounding   (Cholesky residual)

    with scales that are powers of two and everything rounded up. The first exceeds ‖W‖₂ by at most
    a factor min(m, n)^{2^{−K−1}}, the second by about 5e-13 min(m, n) whatever the spectrum; where
    the factorisation breaks down the first stands alone. Cost: two products of W with itself, and
    num_steps products and one eigenvalue problem of size min(m, n).

    Args:
        weight: any floating dtype, converted to float64 exactly; certify weights *after* the cast
            they run in.
        num_steps: K ≥ 1.

    Returns:
        float64, one bound per matrix; 0 for a zero matrix, inf where an entry is NaN or infinite.

    Raises:
        ValueError: ``weight`` is not a (batch of) floating-point matrix or num_steps < 1.

    Source: Delattre et al. 2023, arXiv 2305.16173, Theorem 1; the residual after Rump 2006,
        *Verification of positive definiteness*; rounding terms ours, after Higham 2002, §3.5.
    """
    _check(weight, num_steps)
    g = _tall(weight.detach().to(torch.float64))
    finite = g.isfinite().all(-1).all(-1)
    g = torch.where(finite[..., None, None], g, 0.0)
    bound = torch.minimum(_gram_bound(g, num_steps), _residual_bound(g))
    bound = torch.where(bound > 0, bound.nextafter(torch.full_like(bound, torch.inf)), bound)
    return torch.where(finite, bound, torch.inf)


Normalisation = tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]


def gram_normaliser(weight: Float[Tensor, "*batch m n"], num_steps: int = 8) -> Normalisation:
    """(σ̄, u, v): the bound of Gram iteration in working precision, and the leading singular pair.

    Stateless, deterministic, batched matrix products only: what a differentiable normaliser needs
    once per optimiser step. σ̄ is above ‖W‖₂ by 1e-5 of its size plus the excess of the iteration,
    which covers the rounding met in practice; the certificate is :func:`spectral_norm_bound`. u and
    v come from one column of the last iterate: with a gap after σ₁ they are its singular vectors,
    in a cluster some unit vectors of the cluster; one is the normalised image of the other.

    Args:
        weight: float32 or float64; half precision is computed in float32, with a margin of its eps.
        num_steps: K ≥ 1.

    Returns:
        σ̄ (never zero, so that W/σ̄ is defined for W = 0), u and v, in the dtype of ``weight``. For a
        zero matrix u and v are zero.

    Raises:
        ValueError: ``weight`` is not a (batch of) floating-point matrix or num_steps < 1.
    """
    (found,) = gram_normalisers([weight], num_steps)
    return found


@torch.no_grad()
def gram_normalisers(
    weights: Sequence[Tensor], num_steps: int = 8, overwrite: bool = False
) -> list[Normalisation]:
    """:func:`gram_normaliser` of several batches, those with Gram matrices of one size at once.

    Args:
        weights: batches of matrices.
        num_steps: K ≥ 1.
        overwrite: whether the batches may be scaled in place, which saves as much memory again.

    Raises:
        ValueError: as there, for any of them.
    """
    for weight in weights:
        _check(weight, num_steps)
    found: dict[int, Normalisation] = {}
    by_gram: dict[Hashable, list[int]] = {}
    for index, weight in enumerate(weights):
        key = (min(weight.shape[-2:]), weight.dtype, weight.device)
        by_gram.setdefault(key, []).append(index)
    for indices in by_gram.values():
        group = _normalise_together([weights[index] for index in indices], num_steps, overwrite)
        found.update(zip(indices, group, strict=True))
    return [found[index] for index in range(len(weights))]


def _normalise_together(
    weights: list[Tensor], num_steps: int, overwrite: bool
) -> list[Normalisation]:
    """All of one dtype, device and size of Gram matrix."""
    dtype = weights[0].dtype
    tiny, margin = torch.finfo(dtype).tiny, max(NORMALISER_MARGIN, torch.finfo(dtype).eps)
    divide = Tensor.div_ if overwrite else Tensor.div
    tall = [_tall(w.to(_product_dtype(w))) for w in weights]
    tall = [w.reshape(-1, *w.shape[-2:]) for w in tall]
    with torch.autocast(weights[0].device.type, enabled=False):
        scales = [torch.linalg.matrix_norm(w).clamp(min=tiny) for w in tall]
        tall = [divide(w, s[:, None, None]) for w, s in zip(tall, scales, strict=True)]
        counts, size = [len(w) for w in tall], tall[0].shape[-1]
        grams = tall[0].new_empty(sum(counts), size, size)
        for gram, w in zip(grams.split(counts), tall, strict=True):
            torch.bmm(w.mT, w, out=gram)
        log_bound, g = _squared(grams, num_steps - 1, tiny)
        bounds = (log_bound / 2 + torch.cat(scales).log()).exp()
        bounds = (bounds * (1 + margin)).clamp(min=tiny)

        column = g.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
        rights = _unit(torch.take_along_dim(g, column, dim=-1).squeeze(-1), tiny)
        found = []
        for weight, w, bound, right in zip(
            weights, tall, bounds.split(counts), rights.split(counts), strict=True
        ):
            left = _unit((w @ right.unsqueeze(-1)).squeeze(-1), tiny)
            u, v = (left, right) if weight.shape[-2] >= weight.shape[-1] else (right, left)
            batch = weight.shape[:-2]
            found.append(tuple(t.to(dtype).view((*batch, *t.shape[1:])) for t in (bound, u, v)))
    return found


def _squared(g: Tensor, num_steps: int, tiny: float) -> tuple[Tensor, Tensor]:
    """log of a bound on λ₁ of semidefinite G, and the matrix G^{2^K} to some scale."""
    log_bound = g.new_zeros(len(g))
    other = torch.empty_like(g)
    for step in range(num_steps):
        if step % RESCALE_EVERY == RESCALE_EVERY - 1:
            scale = torch.linalg.matrix_norm(g).clamp(min=tiny)
            log_bound = log_bound + scale.log() / 2**step
            g.div_(scale[..., None, None])
        torch.bmm(g.mT, g, out=other)
        g, other = other, g
    largest = _wolkowicz_styan(g).clamp(min=tiny)
    return log_bound + largest.log() / 2**num_steps, g


@dataclass(frozen=True)
class SpectralNormEstimate:
    """What power iteration found. Never a bound: ``value`` ≤ ‖W‖₂.

    Attributes:
        value: ‖W v‖₂ at the last v, one per matrix.
        residual: ‖Wᵀu − value · v‖₂ / value: zero at a singular pair, which need not be the first.
        u: left vector W v / value.
        v: right unit vector, a warm start for the next call.
    """

    value: Tensor
    residual: Tensor
    u: Tensor
    v: Tensor


def power_iteration(
    weight: Float[Tensor, "*batch m n"], v: Float[Tensor, "*batch n"], num_steps: int
) -> SpectralNormEstimate:
    """An estimate ‖W v‖₂ ≤ ‖W‖₂ after v ← WᵀW v/‖WᵀW v‖, ``num_steps`` times.

    Biased low, without limit: v may be orthogonal to the leading vector, and with close singular
    values convergence is as slow as (σ₂/σ₁)^{2 num_steps}. Cost: two products with W per step.

    Args:
        weight: matrices.
        v: start, not zero; normalised here.
        num_steps: ≥ 0.

    Returns:
        The estimate with its residual and vectors, in the dtype of ``weight``.

    Source: Miyato et al. 2018, arXiv 1802.05957, Algorithm 1 (there called the norm).
    """
    tiny = torch.finfo(weight.dtype).tiny
    right = _unit(v, tiny).unsqueeze(-1)
    for _ in range(num_steps):
        right = _unit((weight.mT @ (weight @ right)).squeeze(-1), tiny).unsqueeze(-1)
    image = (weight @ right).squeeze(-1)
    value = torch.linalg.vector_norm(image, dim=-1)
    left = _unit(image, tiny)
    back = (weight.mT @ left.unsqueeze(-1)).squeeze(-1)
    right = right.squeeze(-1)
    gap = torch.linalg.vector_norm(back - value.unsqueeze(-1) * right, dim=-1)
    return SpectralNormEstimate(value, gap / value.clamp(min=tiny), left, right)


def _check(weight: Tensor, num_steps: int) -> None:
    if weight.ndim < 2 or not weight.is_floating_point() or 0 in weight.shape[-2:]:
        raise ValueError(
            "a spectral norm is of a real matrix (*batch, m, n) with at least one entry, "
            f"got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    if num_steps < 1:
        raise ValueError(f"Gram iteration needs num_steps >= 1, got {num_steps}")


def _tall(weight: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has no more columns than rows."""
    return weight if weight.shape[-2] >= weight.shape[-1] else weight.mT


def _up(value: Tensor, operations: int) -> Tensor:
    """Non-negative float64 values after ``operations`` roundings, made an upper bound."""
    return value * (1 + (operations + 2) * 2 * UNIT_ROUNDOFF)


def _power_of_two_near(value: Tensor) -> Tensor:
    """2^e with value/2^e in [1/2, 1) (e kept in range), exactly, by writing the exponent bits."""
    exponent = torch.frexp(value).exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _wolkowicz_styan(m: Tensor) -> Tensor:
    """λ₁ ≤ t/r + √((r − 1)/r · (f − t²/r)) of semidefinite M, t = tr M, f = ‖M‖_F², size r.

    Never above ‖M‖_F, and equal to λ₁ if the other eigenvalues are equal (Wolkowicz & Styan 1980).
    """
    size = m.shape[-1]
    mean = m.diagonal(dim1=-2, dim2=-1).sum(-1) / size
    variance = (m.square().sum(-1).sum(-1) - size * mean.square()).clamp(min=0)
    return mean + ((size - 1) / size * variance).sqrt()


def _gram_bound(g: Tensor, num_steps: int) -> Tensor:
    """‖G‖₂ ≤ s √(‖fl(G̃ᵀG̃)‖₂ + γ ‖G̃‖_F²), G̃ = G/s, ‖·‖₂ by the same again, at last by ‖·‖_F."""
    if num_steps == 0:
        return _frobenius_up(g)
    g, scale = _scaled(g)
    gram = g.mT @ g
    return _up((_gram_bound(gram, num_steps - 1) + _product_error(g)).sqrt(), 2) * scale


def _residual_bound(g: Tensor) -> Tensor:
    """‖G‖₂ ≤ s √(b + ‖E‖_F), E = bI − G̃ᵀG̃ − RᵀR, G̃ = G/s: ∞ if the factorisation gave no number."""
    g, scale = _scaled(g)
    gram = g.mT @ g
    size = gram.shape[-1]
    b = torch.linalg.eigvalsh(gram)[..., -1] * (1 + RESIDUAL_SHIFT * size)
    shifted = torch.diag_embed(b.unsqueeze(-1).expand(*b.shape, size)) - gram
    r = torch.linalg.cholesky_ex(shifted).L.mT
    residual = shifted - r.mT @ r
    # The exact E differs from the residual by the rounding of two products and two differences.
    rounding = _product_error(g) + _product_error(r)
    rounding = rounding + 2 * UNIT_ROUNDOFF * (_frobenius_up(shifted) + _frobenius_up(residual))
    squared = b.clamp(min=0) + _frobenius_up(residual) + _up(rounding, 4)
    bound = _up(squared.sqrt(), 3) * scale
    return torch.where(bound.isnan(), torch.inf, bound)


def _scaled(g: Tensor) -> tuple[Tensor, Tensor]:
    """G/s and s, the power of two for which the largest entry of G/s is in [1/2, 1).

    Exact but for entries that underflow. They are covered as well: next to the largest entry, every
    margin in this file leaves room for far more than the smallest float64.
    """
    scale = _power_of_two_near(g.abs().amax((-2, -1)))
    return g / scale[..., None, None], scale


def _product_error(g: Tensor) -> Tensor:
    """γ ‖G‖_F² ≥ ‖fl(GᵀG) − GᵀG‖_F, in any order of summation."""
    rows, columns = g.shape[-2:]
    return _up((rows + 2) * UNIT_ROUNDOFF * g.square().sum(-1).sum(-1), rows + columns + 2)


def _frobenius_up(g: Tensor) -> Tensor:
    """‖G‖_F, rounded up."""
    return _up(g.square().sum(-1).sum(-1).sqrt(), sum(g.shape[-2:]) + 1)


def _unit(x: Tensor, tiny: float) -> Tensor:
    """x/‖x‖₂ along the last dimension; zero stays zero."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=tiny)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """float32 or more; float64 where the backend would multiply float32 in TF32 or bfloat16."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(weight.device.type)
    if backend is not None and backend.matmul.fp32_precision in ("tf32", "bf16"):
        return torch.float64
    return torch.promote_types(weight.dtype, torch.float32)
