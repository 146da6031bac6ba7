"""Kim et al. 2021, Theorem 3.2: the Lipschitz constant of tied L2 multi-head attention.

    F(X)_i = Σ_h Y_i^h G_h,   Y^h = P^h q^h,   q^h = X W^Q_h,   G_h = W^Q_hᵀ W^V_h W^O_h / √d
    P^h = softmax_j(−‖q_i − q_j‖²/√d + b_h(i − j))

The tie W^K = W^Q, a visible self token and the factor A_h = W^Q_h W^Q_hᵀ/√d in the value path are
assumptions: without any one of them the map is not Lipschitz. The theorem is stated for a plain
softmax; a relative bias with b_h(0) = 0 replaces N − 1 by n_h = Σ_{j ≠ i} e^{b_h(i − j)}, the mass
of the other tokens in the fullest row (ours, docs/numerics.md).

Every function returns a Python float that is a proven upper bound, rounding included.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.lambert_w import phi_inverse_upper, phi_inverse_upper_from_log
from invformer.numerics.rounding import product_up, quotient_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

Visible = int | Tensor

# Absolute slack for log masses that come from a float64 logsumexp: it costs a bound less than that.
LOG_MASS_SLACK = 1e-9


def entry_max_bound(
    w_q: Float[Tensor, "heads width d_head"],
    w_v: Float[Tensor, "heads width d_head"],
    w_o: Float[Tensor, "width width_out"],
    visible: Visible,
) -> float:
    """Lip(F) in entry_max ≤ (4u + 1/√d) ‖W^Oᵀ‖_∞ max_h(‖W^Q_h‖_∞‖W^Q_hᵀ‖_∞) max_h‖W^V_hᵀ‖_∞.

    u = max_h g(n_h); ‖·‖_∞ is the largest absolute row sum. Grows like log N.

    Args:
        w_q: W^Q, one D × d matrix per head.
        w_v: W^V, one D × d matrix per head.
        w_o: W^O, rows grouped by head.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound.

    Raises:
        ValueError: shapes do not fit together.

    Source: Kim et al. 2021, arXiv 2006.04710, Theorem 3.2.
    """
    _check_heads(w_q, "w_v", w_v)
    u = max(mean_gap_bounds(visible, len(w_q)))
    bracket = sum_up(product_up(4, u), sqrt_up(quotient_up(1, w_q.shape[-1])))
    query = max(product_up(max_row_sum(w), max_row_sum(w.mT)) for w in w_q)
    value = max(max_row_sum(w.mT) for w in w_v)
    return product_up(bracket, max_row_sum(w_o.mT), query, value)


def frobenius_bound(
    w_q: Float[Tensor, "heads width d_head"],
    w_v: Float[Tensor, "heads width d_head"],
    w_o: Float[Tensor, "width width_out"],
    visible: Visible,
    num_tokens: int,
) -> float:
    """Lip(F) in frobenius ≤ √(N/d) (4u + 1) √(Σ_h ‖W^Q_h‖₂⁴ ‖W^V_h‖₂²) ‖W^O‖₂.

    The exponent of ‖W^Q_h‖₂ is 4. It is often reproduced as 2, which cannot hold: F is quadratic in
    W^Q (N = 2, D = 1, W^Q = 10, X = 0 has ‖J‖₂ = 100, and the square gives 29.9).

    Args:
        w_q: W^Q, one D × d matrix per head.
        w_v: W^V, one D × d matrix per head.
        w_o: W^O, rows grouped by head.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).
        num_tokens: number of rows N.

    Returns:
        The bound.

    Raises:
        ValueError: shapes do not fit together.

    Source: Kim et al. 2021, arXiv 2006.04710, Theorem 3.2.
    """
    _check_heads(w_q, "w_v", w_v)
    u = max(mean_gap_bounds(visible, len(w_q)))
    query = spectral_norm_bound(w_q).tolist()
    value = spectral_norm_bound(w_v).tolist()
    heads = (product_up(q, q, q, q, v, v) for q, v in zip(query, value, strict=True))
    return product_up(
        sqrt_up(quotient_up(num_tokens, w_q.shape[-1])),
        head_gain(u),
        sqrt_up(sum_up(*heads)),
        spectral_norm_bound(w_o).item(),
    )


def entry_max_composite_bound(
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width_out"],
    visible: Visible,
) -> float:
    """Lip(F) in entry_max ≤ max_k Σ_h (4 √d u_h + 1) ‖W^Q_hᵀ‖_∞ Σ_m |G_h|_mk, u_h = g(n_h).

    Theorem 3.2 with the weight product of each head kept together, output channel by channel: never
    above the printed form, typically two orders of magnitude below it.

    Args:
        w_q: W^Q, one D × d matrix per head.
        g: effective output maps G_h = W^Q_hᵀ W^V_h W^O_h / √d, or any others.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound.

    Raises:
        ValueError: shapes do not fit together.

    Source: ours, from the proof of Kim et al. 2021, Theorem 3.2 (docs/numerics.md).
    """
    _check_heads(w_q, "g", g.mT)
    gaps = mean_gap_bounds(visible, len(w_q))
    brackets = (sum_up(product_up(4, sqrt_up(w_q.shape[-1]), u), 1) for u in gaps)
    gains = [
        product_up(bracket, max_row_sum(w_h.mT)) for bracket, w_h in zip(brackets, w_q, strict=True)
    ]
    weighted = (
        g.detach().double().cpu().abs() * torch.tensor(gains, dtype=torch.float64)[:, None, None]
    )
    # A chain of H d sums behind one product; inf · 0 is NaN, which rounds up to inf.
    return round_up(weighted.sum((0, 1)).amax().item(), weighted.shape[0] * weighted.shape[1] + 1)


def frobenius_composite_bound(
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width_out"],
    visible: Visible,
    num_tokens: int,
) -> float:
    """Lip(F) in frobenius ≤ √N Σ_h (4u_h + 1) ‖G_h‖₂ ‖W^Q_h‖₂, u_h = g(n_h).

    Args:
        w_q: W^Q, one D × d matrix per head.
        g: effective output maps G_h = W^Q_hᵀ W^V_h W^O_h / √d, or any others.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).
        num_tokens: number of rows N.

    Returns:
        The bound.

    Raises:
        ValueError: shapes do not fit together.

    Source: ours, from the proof of Kim et al. 2021, Theorem 3.2 (docs/numerics.md).
    """
    _check_heads(w_q, "g", g.mT)
    gaps = mean_gap_bounds(visible, len(w_q))
    query, out = spectral_norm_bound(w_q).tolist(), spectral_norm_bound(g).tolist()
    heads = (
        product_up(head_gain(u), norm_g, norm_q)
        for u, norm_g, norm_q in zip(gaps, out, query, strict=True)
    )
    return product_up(sqrt_up(num_tokens), sum_up(*heads))


def mean_gap_bounds(visible: Visible, num_heads: int) -> list[float]:
    """g(n_h) ≥ Σ_j P_ij s_j per head, s_j = ‖q_i − q_j‖²/√d: the lemma under every bound here.

    With weights ∝ e^{b_j − s_j} and the self token's ∝ 1, the mean gap is largest when all other
    tokens are at s_j = 1 + g, where g e^{g+1} = n.

    Args:
        visible: number of tokens N in a row (n = N − 1), or log n_h of each head, or of all in one.
        num_heads: H.

    Returns:
        H numbers, rounded up.

    Raises:
        ValueError: N < 1, or log masses in another dtype or shape.

    Source: Kim et al. 2021, arXiv 2006.04710, appendix F, for equal masses.
    """
    if isinstance(visible, int):
        if visible < 1:
            raise ValueError(f"a token always sees itself: got {visible} visible tokens")
        return [phi_inverse_upper(visible - 1)] * num_heads
    return [phi_inverse_upper_from_log(m) for m in log_mass_bounds(visible, num_heads)]


def head_gain(mean_gap: float) -> float:
    """4g + 1 ≥ Σ_j ‖∂Y_i/∂q_j‖₂, rounded up: the gain of one head, from its mean gap g."""
    return sum_up(product_up(4, mean_gap), 1)


def log_mass_bounds(log_mass: Tensor, num_heads: int) -> list[float]:
    """Log masses as floats, one per head, lifted above the rounding of the sum they came from.

    Args:
        log_mass: (H,) or (1,), float64.
        num_heads: H.

    Returns:
        H numbers.

    Raises:
        ValueError: another dtype (float32 rounding would show in the bound) or shape.
    """
    if log_mass.dtype != torch.float64 or log_mass.shape not in {(1,), (num_heads,)}:
        raise ValueError(
            f"a certificate needs log masses in float64, one or {num_heads} of them, "
            f"got {log_mass.dtype} of shape {tuple(log_mass.shape)}"
        )
    return [m + LOG_MASS_SLACK for m in log_mass.detach().expand(num_heads).tolist()]


def max_row_sum(w: Float[Tensor, "m n"]) -> float:
    """‖W‖_∞ = max_i Σ_j |W_ij|, computed in float64 and rounded up."""
    sums = w.detach().to(torch.float64).abs().sum(-1)
    return round_up(sums.amax().item(), w.shape[-1])


def _check_heads(w_q: Tensor, name: str, other: Tensor) -> None:
    """Both (heads, ·, d_head), with the same heads and d_head (g is passed transposed)."""
    fits = w_q.ndim == other.ndim == 3 and w_q.shape[::2] == other.shape[::2]
    if not fits:
        raise ValueError(
            f"w_q is (heads, width, d_head) and {name} must have its heads and d_head: "
            f"got {tuple(w_q.shape)} and, last axis d_head, {tuple(other.shape)}"
        )
