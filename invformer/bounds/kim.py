"""Kim et al. 2021, arXiv 2006.04710, Theorem 3.2: tied L2 multi-head attention as published.

    F(X)_i = Σ_h Y_i^h G_h,   Y^h = P^h q^h,   q^h = X W^Q_h,   G_h = W^Q_hᵀ W^V_h W^O_h / √d
    P^h = softmax_j(−‖q_i − q_j‖²/√d + b_h(i − j))

The tie W^K = W^Q, a visible self token and the factor A_h = W^Q_h W^Q_hᵀ/√d in the value path are
assumptions: without any one of them the map is not Lipschitz. u is the largest φ⁻¹(n_h) of the
heads (:mod:`.head_gain`, also for ``visible``); the paper has no bias, and n = N − 1. ‖·‖_∞ is the
largest absolute row sum. Results are Python floats, proven, rounding included.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds.head_gain import Visible, head_gain, mean_gaps
from invformer.numerics.rounding import product_up, quotient_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound


def entry_max_bound(
    w_q: Float[Tensor, "heads width d_head"],
    w_v: Float[Tensor, "heads width d_head"],
    w_o: Float[Tensor, "width width_out"],
    visible: Visible,
) -> float:
    """Lip(F) in entry_max ≤ (4u + 1/√d) ‖W^Oᵀ‖_∞ max_h(‖W^Q_h‖_∞‖W^Q_hᵀ‖_∞) max_h‖W^V_hᵀ‖_∞."""
    u = max(mean_gaps(visible, len(w_q)))
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
    """
    u = max(mean_gaps(visible, len(w_q)))
    query, value = spectral_norm_bound(w_q).tolist(), spectral_norm_bound(w_v).tolist()
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
    """Lip(F) in entry_max ≤ max_k Σ_h (4 √d u_h + 1) ‖W^Q_hᵀ‖_∞ Σ_m |G_h|_mk, u_h = φ⁻¹(n_h).

    Ours, from the proof of Theorem 3.2 (docs/numerics.md), for any output maps G_h: each head's
    product is kept together, output channel by output channel. Never above the printed form,
    typically two orders of magnitude below it.
    """
    gaps = mean_gaps(visible, len(w_q))
    brackets = (sum_up(product_up(4, sqrt_up(w_q.shape[-1]), u), 1) for u in gaps)
    gains = [product_up(a, max_row_sum(w.mT)) for a, w in zip(brackets, w_q, strict=True)]
    scale = torch.tensor(gains, dtype=torch.float64)[:, None, None]
    weighted = g.detach().double().cpu().abs() * scale
    # A chain of H d sums behind one product; inf · 0 is NaN, which rounds up to inf.
    return round_up(weighted.sum((0, 1)).amax().item(), weighted.shape[0] * weighted.shape[1] + 1)


def max_row_sum(w: Float[Tensor, "m n"]) -> float:
    """‖W‖_∞ = max_i Σ_j |W_ij|, computed in float64 and rounded up."""
    sums = w.detach().to(torch.float64).abs().sum(-1)
    return round_up(sums.amax().item(), w.shape[-1])
