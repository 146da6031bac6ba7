"""A certified bound on the spectral norm ‖W‖₂ = σ_max(W): proven ≥, rounding included.

Gram iteration alone is up to 1 % too large for a cluster of singular values at the top, and
training with a spectral normaliser produces clusters: hence a second bound. docs/numerics.md §8.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import is_denormal
from invformer.numerics.rounding import UNIT_ROUNDOFF

# b is this much above the computed λ₁, per row: room for the factorisation's own rounding.
RESIDUAL_SHIFT = 1e-12
# Scales are powers of two within these exponents: they and their inverses are normal numbers.
LARGEST_EXPONENT = 1022
# K without the second bound: the excess is then below that of the second.
STEPS_ALONE = 40
# Steps from one scaling to the next. Norms between 1/2 and n become at least 2⁻⁶⁴, at most n⁶⁴.
STEPS_PER_SCALING = 6


def spectral_norm_bound(
    weight: Float[Tensor, "*batch m n"], num_steps: int = 8
) -> Float[Tensor, "*batch"]:
    """A proven upper bound on ‖W‖₂ of every matrix: the smaller of two, both in float64.

        ‖W‖₂² ≤ λ₁(G) + γ ‖W‖_F²,  G = fl(WᵀW),  γ = m u/(1 − m u),  u = 2⁻⁵³,  and for λ₁(G)
        ‖X‖₂² ≤ ‖fl(XᵀX)‖₂/(1 − n γ) from X = G on, γ of n rows   (Gram iteration)
        λ₁(G) ≤ b + ‖fl(bI − G − RᵀR)‖_F + rounding   (Cholesky residual)

    b is just above the computed λ₁(G), and R the Cholesky factor of bI − G. Scales are powers of
    two, everything is rounded up, and denormal entries count even where they are flushed to zero.
    The first exceeds ‖W‖₂ by at most a factor min(m, n)^{2^{−K−1}}, the second by about
    5e-13 min(m, n) for every spectrum; if the factorisation fails, the first stands alone. Cost:
    a product of W with itself, and num_steps products and one eigenvalue problem of size min(m, n).
    On a GPU, where eigenvalues take longer than products, the first stands alone with K = 40;
    elsewhere K is ``num_steps``. The bound is 0 for a zero matrix, inf where an entry is NaN or
    infinite. Certify weights *after* the cast they run in.

    Raises:
        ValueError: ``weight`` is not a (batch of) floating-point matrix.

    Source: Delattre et al. 2023, arXiv 2305.16173, Theorem 1; the residual after Rump 2006,
        *Verification of positive definiteness*; rounding terms ours, after Higham 2002, §3.5.
    """
    check_matrix(weight)
    weight = weight.detach()
    g = tall_side(weight.to(torch.float64))
    largest = g.abs().amax((-2, -1))
    not_finite = ~(largest < torch.inf)  # or NaN
    g, scale = _scaled(g, largest)
    gram = g.mT @ g
    if eigenvalues_are_cheap(g.device):
        # LAPACK refuses numbers that are not finite.
        finite = torch.where(not_finite[..., None, None], 0.0, gram)
        squared = torch.minimum(_gram_bound(gram, num_steps - 1), _residual_bound(finite))
    else:
        squared = _gram_bound(gram, STEPS_ALONE - 1)
    bound = _up((squared + _product_error(g)).sqrt(), 2) * scale + _flushed(weight)
    return bound.nextafter(2 * bound).masked_fill(not_finite, torch.inf)  # zero stays zero


def check_matrix(weight: Tensor) -> None:
    """Raise ValueError if there is no floating-point matrix with entries."""
    if weight.ndim < 2 or not weight.is_floating_point() or 0 in weight.shape[-2:]:
        raise ValueError(
            "a spectral norm is of a real matrix (*batch, m, n) with at least one entry, "
            f"got {weight.dtype} of shape {tuple(weight.shape)}"
        )


def eigenvalues_are_cheap(device: torch.device) -> bool:
    """On a GPU one eigenvalue problem takes longer than forty products."""
    return device.type == "cpu"


def tall_side(weight: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has no more columns than rows."""
    return weight if weight.shape[-2] >= weight.shape[-1] else weight.mT


def _flushed(weight: Tensor) -> Tensor:
    """≥ ‖E‖_F of the denormal entries E of W, which this thread may take for zeros.

    Denormal numbers of float16 are normal in any wider format.
    """
    if weight.dtype == torch.float16:
        return torch.zeros((), dtype=torch.float64, device=weight.device)
    count = is_denormal(weight).sum((-2, -1), dtype=torch.float64)
    return _up(count.sqrt() * torch.finfo(weight.dtype).tiny, 2)


def _up(value: Tensor, operations: int) -> Tensor:
    """Non-negative float64 values after ``operations`` roundings, made an upper bound."""
    return value * (1 + (operations + 2) * 2 * UNIT_ROUNDOFF)


def _gram_bound(x: Tensor, num_steps: int) -> Tensor:
    """‖X‖₂ ≤ s √(‖fl(X̃ᵀX̃)‖₂/(1 − n γ)), X̃ = X/s, ‖·‖₂ by the same again, at last by ‖·‖_F.

    X is a Gram matrix: its largest entry is on the diagonal.
    """
    if num_steps == 0:
        return _frobenius_up(x)
    x, scale = _scaled(x, x.diagonal(dim1=-2, dim2=-1).amax(-1))
    steps = min(num_steps, STEPS_PER_SCALING)
    for _ in range(steps):
        x = x.mT @ x
    bound = _gram_bound(x, num_steps - steps) ** 0.5**steps
    # n γ/2 of the first product, half as much of the next and so on; 4 for the root.
    return _up(bound, x.shape[-1] ** 2 + 4) * scale


def _residual_bound(gram: Tensor) -> Tensor:
    """λ₁(G) ≤ b + ‖E‖_F, E = bI − G − RᵀR: ∞ if the factorisation gave no number."""
    size = gram.shape[-1]
    b = torch.linalg.eigvalsh(gram)[..., -1] * (1 + RESIDUAL_SHIFT * size)
    shifted = torch.diag_embed(b.unsqueeze(-1).expand(*b.shape, size)) - gram
    r = torch.linalg.cholesky_ex(shifted).L.mT
    residual = shifted - r.mT @ r
    # The exact E differs from the residual by the rounding of a product and two differences.
    rounding = 2 * UNIT_ROUNDOFF * (_frobenius_up(shifted) + _frobenius_up(residual))
    rounding = rounding + _product_error(r)
    bound = _up(b.clamp(min=0) + _frobenius_up(residual) + _up(rounding, 4), 2)
    return torch.where(bound.isnan(), torch.inf, bound)


def _scaled(g: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """G/s and s, a power of two: the largest entry of G/s is in [1/2, 1), if that of G is in range.

    Exact except for entries that underflow. They are covered as well: next to the largest entry,
    every margin in this file leaves room for far more than the smallest normal float64.
    """
    largest = largest.clamp(2.0**-LARGEST_EXPONENT, 2.0 ** (LARGEST_EXPONENT - 1))
    scale = largest / torch.frexp(largest).mantissa
    return g / scale[..., None, None], scale


def _product_error(g: Tensor) -> Tensor:
    """γ ‖G‖_F² ≥ ‖fl(GᵀG) − GᵀG‖_F, in any order of summation."""
    rows, columns = g.shape[-2:]
    return _up((rows + 2) * UNIT_ROUNDOFF * g.square().sum(-1).sum(-1), rows + columns + 2)


def _frobenius_up(g: Tensor) -> Tensor:
    """‖G‖_F, rounded up."""
    return _up(g.square().sum(-1).sum(-1).sqrt(), sum(g.shape[-2:]) + 1)
