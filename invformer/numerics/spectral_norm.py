"""Spectral norms ‖W‖₂ = σ_max(W): a certified bound, a normaliser's bound, an estimate.

| function | precision | stands to ‖W‖₂ |
|---|---|---|
| :func:`spectral_norm_bound` | float64 | proven ≥, rounding included |
| :func:`gram_normaliser` | float32 | ≥ in practice, not proven |
| :func:`power_iteration` | that of W | ≤, an estimate from below |

Gram iteration (Delattre et al. 2023, arXiv 2305.16173) squares the singular values K times,
G_{k+1} = G_kᵀG_k, and bounds the last iterate; a factor c there is a factor c^{2^{−K}} on ‖W‖₂.
The last iterate M is positive semidefinite with known trace t, squared Frobenius norm f and size r,
so its largest eigenvalue obeys (Wolkowicz & Styan 1980, Theorem 2.1)

    λ₁ ≤ t/r + √((r − 1)/r · (f − t²/r)),

which equals λ₁ when all other eigenvalues are equal, in particular for orthogonal matrices, and
never exceeds Delattre's ‖M‖_F.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.rounding import UNIT_ROUNDOFF

# Relative margin that lifts the normaliser above the rounding of its float32 Gram matrices.
NORMALISER_MARGIN = 1e-5
# Scales are powers of two within these exponents: they and their inverses are normal numbers.
LARGEST_EXPONENT = 1022


def spectral_norm_bound(
    weight: Float[Tensor, "*batch m n"], num_steps: int = 8
) -> Float[Tensor, "*batch"]:
    """A proven upper bound on ‖W‖₂ of every matrix, by Gram iteration in float64.

        ‖G‖₂² = ‖GᵀG‖₂ ≤ ‖fl(GᵀG)‖₂ + γ ‖G‖_F²,    γ = r u/(1 − r u), r rows, u = 2⁻⁵³

    at every step, with scales that are powers of two and everything rounded up. The excess over
    ‖W‖₂ halves with every step: at num_steps = 8 below 2e-6 for trained matrices and for orthogonal
    ones, at most r^{1/512} − 1 (1.2 % at r = 512) for any spectrum. Cost: one product of W with
    itself and num_steps − 1 products of min(m, n)-sized matrices.

    Args:
        weight: any floating dtype, converted to float64 exactly; certify weights *after* the cast
            they run in.
        num_steps: K ≥ 1.

    Returns:
        float64, one bound per matrix; 0 for a zero matrix, inf where an entry is NaN or infinite.

    Raises:
        ValueError: ``weight`` is not a (batch of) floating-point matrix or num_steps < 1.

    Source: Delattre et al. 2023, arXiv 2305.16173, Theorem 1; the rounding terms are ours
        (docs/numerics.md), after Higham 2002, §3.5.
    """
    _check(weight, num_steps)
    g = _tall(weight.detach().to(torch.float64))
    finite = g.isfinite().all(-1).all(-1)
    bound = _gram_bound(torch.where(finite[..., None, None], g, 0.0), num_steps)
    bound = torch.where(bound > 0, bound.nextafter(torch.full_like(bound, torch.inf)), bound)
    return torch.where(finite, bound, torch.inf)


@torch.no_grad()
def gram_normaliser(
    weight: Float[Tensor, "*batch m n"], num_steps: int = 8
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]:
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
    _check(weight, num_steps)
    with torch.autocast(weight.device.type, enabled=False):
        w = weight.to(_product_dtype(weight))
        tiny = torch.finfo(weight.dtype).tiny
        g = _tall(w)
        log_bound = w.new_zeros(w.shape[:-2])
        for step in range(num_steps):
            scale = torch.linalg.matrix_norm(g).clamp(min=tiny)
            log_bound = log_bound + scale.log() / 2**step
            g = g / scale[..., None, None]
            g = g.mT @ g
        largest = _wolkowicz_styan(*_moments(g), g.shape[-1]).clamp(min=tiny)
        log_bound = log_bound + largest.log() / 2**num_steps
        margin = max(NORMALISER_MARGIN, torch.finfo(weight.dtype).eps)
        bound = (log_bound.exp() * (1 + margin)).clamp(min=tiny)

        column = g.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True).unsqueeze(-2)
        right = _unit(torch.take_along_dim(g, column, dim=-1).squeeze(-1), tiny)
        left = _unit((_tall(w) @ right.unsqueeze(-1)).squeeze(-1), tiny)
    u, v = (left, right) if w.shape[-2] >= w.shape[-1] else (right, left)
    return bound.to(weight.dtype), u.to(weight.dtype), v.to(weight.dtype)


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


def _down(value: Tensor, operations: int) -> Tensor:
    """Non-negative float64 values after ``operations`` roundings, made a lower bound."""
    return value * (1 - (operations + 2) * 2 * UNIT_ROUNDOFF)


def _power_of_two_near(value: Tensor) -> Tensor:
    """2^e with value/2^e in [1/2, 1) (e kept in range), exactly, by writing the exponent bits."""
    exponent = torch.frexp(value).exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _moments(m: Tensor) -> tuple[Tensor, Tensor]:
    """Trace and squared Frobenius norm."""
    return m.diagonal(dim1=-2, dim2=-1).sum(-1), m.square().sum(-1).sum(-1)


def _wolkowicz_styan(trace: Tensor, squared_norm: Tensor, size: int) -> Tensor:
    """t/r + √((r − 1)/r · (f − t²/r)) ≥ λ₁ of a semidefinite matrix."""
    variance = (squared_norm - trace.square() / size).clamp(min=0)
    return trace / size + ((size - 1) / size * variance).sqrt()


def _gram_bound(g: Tensor, num_steps: int) -> Tensor:
    """‖G‖₂ ≤ s √(‖fl(G̃ᵀG̃)‖₂ + γ ‖G̃‖_F²), G̃ = G/s, s a power of two; λ₁ at the last step.

    Entries of G̃ that underflow are covered as well: the largest is near one, and every margin here
    leaves room for far more than the smallest float64.
    """
    scale = _power_of_two_near(g.abs().amax((-2, -1)))
    g = g / scale[..., None, None]
    rows, columns = g.shape[-2:]
    trace = g.square().sum(-1).sum(-1)  # tr GᵀG = ‖G‖_F², at most rows + columns roundings
    gram_error = _up((rows + 2) * UNIT_ROUNDOFF * trace, rows + columns + 2)
    gram = g.mT @ g
    if num_steps > 1:
        squared = _gram_bound(gram, num_steps - 1) + gram_error
    else:
        bounds = _down(trace, rows + columns), _up(trace, rows + columns)
        squared = _largest_eigenvalue_bound(gram, bounds, gram_error)
    return _up(squared.sqrt(), 2) * scale


def _largest_eigenvalue_bound(
    gram: Tensor, trace: tuple[Tensor, Tensor], gram_error: Tensor
) -> Tensor:
    """min(‖M‖_F, t/r + √((r − 1)/r · (‖M‖_F² − t²/r))) ≥ λ₁ of the exact M = GᵀG, rounded up.

    M itself is semidefinite; its computed version need not be. So t = tr M = ‖G‖_F² and ‖M‖_F enter
    by what is known of the exact ones: t from above where it adds, from below where it subtracts.

    Args:
        gram: fl(GᵀG).
        trace: two numbers, ≤ t and ≥ t.
        gram_error: a number ≥ ‖fl(GᵀG) − GᵀG‖_F.

    Returns:
        An upper bound on λ₁(M) = ‖G‖₂².
    """
    size = gram.shape[-1]
    trace_down, trace_up = trace
    norm = _up(gram.square().sum(-1).sum(-1).sqrt(), 2 * size + 1)
    norm = _up(norm + gram_error, 1)
    variance = _up(norm.square(), 1) - _down(trace_down.square() / size, 2)
    spread = ((size - 1) / size * variance.clamp(min=0)).sqrt()
    return torch.minimum(norm, _up(trace_up / size + spread, 6))


def _unit(x: Tensor, tiny: float) -> Tensor:
    """x/‖x‖₂ along the last dimension; zero stays zero."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=tiny)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """float32 or more; float64 where the backend would multiply float32 in TF32 or bfloat16."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(weight.device.type)
    if backend is not None and backend.matmul.fp32_precision in ("tf32", "bf16"):
        return torch.float64
    return torch.promote_types(weight.dtype, torch.float32)
