"""Certificates for L2 attention that is a contraction by construction (ours, docs/numerics.md).

Both maps are F(X)_i = Σ_h Y_i^h G_h with P^h = softmax_j(b_h(i − j) − s_ij^h) and b_h(0) = 0, for
any mask that keeps the self token visible.

    tied:      Y^h = P^h q^h,  s_ij = ‖q_i − q_j‖²/√d,  q = X W^Q_h
    anchored:  Y^h = P^h v^h,  s_ij = ‖q_i − k_j‖²/√d for j ≠ i,  s_ii = 0,  q = X W^Q_h,
               k = X W^K_h,  v = z/√(1 + ‖z‖²),  z = X W^V_h

Let n = Σ_{j ≠ i} e^{b(i − j)} be the mass of the other visible tokens and g = g(n), g e^{g+1} = n.
The self token has weight ∝ 1, hence Σ_j P_ij s_ij ≤ g. With C_i the P_i-covariance of q, tied:

    dY_i = Σ_j B_ij dq_j,   B_ij = P_ij [I − (2/√d)(q_j − Y_i)(q_j − q_i)ᵀ] + δ_ij (2/√d) C_i

tr C_i ≤ Σ_j P_ij ‖q_j − q_i‖² ≤ √d g and Cauchy–Schwarz on the rank-one terms give

    Σ_j ‖B_ij‖₂ ≤ 4g + 1,     ‖B_ii‖₂ = ‖P_ii I + (2/√d) C_i‖₂ ≤ κ(n) = 1 + 2 W₀(n e^{−3/2}).

What remains is to compose heads: a gain a_h per head, W^Q_h before it and G_h after it. Any
positive weights per head give a valid bound; two choices are tried and the smaller is returned.
Every function returns a Python float that is a proven upper bound, rounding included.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds.kim import Visible, head_gain, log_mass_bounds, mean_gap_bounds
from invformer.numerics.lambert_w import causal_gain_upper, causal_gain_upper_from_log
from invformer.numerics.rounding import product_up, quotient_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound


def token_max_bound(
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width_out"],
    visible: Visible,
) -> float:
    """Lip(F) in token_max ≤ min_w ‖[κ_h σ_h G_h / w_h]_h‖₂ √(Σ_h w_h²), κ_h = 4 g(n_h) + 1.

    σ_h = ‖W^Q_h‖₂ and [·]_h stacks the heads' rows. w_h = 1 is √H ‖[κ_h σ_h G_h]‖₂, the form that
    G_h = Ĝ_h/(κ_h σ_h) turns into √H ‖Ĝ‖₂; w_h² = κ_h σ_h ‖G_h‖₂ is never above Σ_h κ_h σ_h ‖G_h‖₂.
    Both are tried. No √N; the √H is real in this norm, because heads may look at different tokens.

    Args:
        w_q: W^Q, one D × d matrix per head.
        g: output maps G_h, every constant folded in.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound, for every mask that keeps the self token and shows no row a larger mass.

    Raises:
        ValueError: ``visible`` does not fit the heads.

    Source: ours, docs/numerics.md.
    """
    gaps = mean_gap_bounds(visible, len(w_q))
    query = spectral_norm_bound(w_q).tolist()
    gains = [product_up(head_gain(u), q) for u, q in zip(gaps, query, strict=True)]
    return one_input_per_head(gains, g)


def frobenius_bound(
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width_out"],
    log_mass: Float[Tensor, "#heads tokens"],
) -> float:
    """Lip(F) in frobenius ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(K_h/s_h) W^Q_h]_h‖₂.

        K_h² = Σ_i κ_{h,i}²,   κ_{h,i} = 4 g(n_{h,i}) + 1,   n_{h,i} the mass that row i sees

    Derivation. ‖dY_i^h‖ ≤ Σ_j ‖B_ij‖‖dq_j‖ ≤ √(Σ_j ‖B_ij‖²) ‖dQ^h‖_F ≤ κ_{h,i} ‖dQ^h‖_F, so
    ‖dY^h‖_F ≤ K_h ‖dQ^h‖_F. Heads: ‖dF_i‖² ≤ ‖[s_h G_h]‖₂² Σ_h ‖dY_i^h‖²/s_h², summed over i, and
    Σ_h (K_h/s_h)² ‖dX W^Q_h‖_F² ≤ ‖[(K_h/s_h) W^Q_h]‖₂² ‖dX‖_F². K_h ≤ √N κ_h stands where
    Kim et al. have √N (4u + 1), and is smaller where rows see less, as under a causal mask.

    Tried: s_h = K_h σ_h, never above ‖Ĝ‖₂ ‖[W^Q_h/σ_h]_h‖₂ √(Σ_i max_h (κ_{h,i}/κ_h)²) where
    G_h = Ĝ_h/(κ_h σ_h); and s_h² = K_h σ_h/‖G_h‖₂, never above Σ_h K_h σ_h ‖G_h‖₂.

    Args:
        w_q: W^Q, one D × d matrix per head.
        g: output maps G_h, every constant folded in.
        log_mass: log n_{h,i}, the mass every row i sees besides itself (−∞ for none), float64; one
            row of it if all heads share it.

    Returns:
        The bound, for sequences of at most as many tokens as ``log_mass`` has.

    Raises:
        ValueError: ``log_mass`` does not fit the heads.

    Source: ours, docs/numerics.md.
    """
    rows = [mean_gap_bounds(row, len(w_q)) for row in log_mass.unbind(-1)]
    gains = [
        sqrt_up(sum_up(*(product_up(k, k) for k in map(head_gain, head))))
        for head in zip(*rows, strict=True)
    ]
    return one_input_for_all(gains, w_q, g)


def causal_bound(
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width_out"],
    visible: Visible,
) -> float:
    """sup ‖∂F_i/∂x_i‖₂ ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(κ_h/s_h) W^Q_h]_h‖₂, κ_h = 1 + 2 W₀(n_h e^{−3/2}).

    The diagonal blocks of a causal Jacobian, earlier tokens held fixed. Below one, x + F(x) can be
    inverted token by token. It is *not* a Lipschitz constant of F in any norm. s_h = κ_h σ_h gives
    ‖Ĝ‖₂ ‖[W^Q_h/σ_h]‖₂ for G_h = Ĝ_h/(κ_h σ_h); s_h² = κ_h σ_h/‖G_h‖₂ is tried too.

    Args:
        w_q: W^Q, one D × d matrix per head.
        g: output maps G_h, every constant folded in.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound.

    Raises:
        ValueError: ``visible`` does not fit the heads.

    Source: ours, docs/numerics.md.
    """
    return one_input_for_all(causal_gain_bounds(visible, len(w_q)), w_q, g)


def anchored_token_max_bound(
    w_q: Float[Tensor, "heads width d_head"],
    w_k: Float[Tensor, "heads width d_head"],
    w_v: Float[Tensor, "heads width d_value"],
    g: Float[Tensor, "heads d_value width_out"],
    visible: Visible,
) -> float:
    """Lip(F) of anchored attention in token_max ≤ min_w ‖[L_h G_h / w_h]_h‖₂ √(Σ_h w_h²).

        L_h = σ_V + 2 (σ_Q + σ_K) √g(n_h) d^{−1/4},   σ the spectral norms of the head's matrices

    dY_i = Σ_j P_ij dv_j + Σ_j P_ij dS_ij (v_j − Y_i), |dS_ij| ≤ (2/√d) ‖q_i − k_j‖ ‖dq_i − dk_j‖;
    Σ_{j ≠ i} P_ij ‖q_i − k_j‖² ≤ √d g, Σ_j P_ij ‖v_j − Y_i‖² ≤ 1 because ‖v‖ < 1, and dS_ii = 0.
    Heads compose as in :func:`token_max_bound`. Global, for any mask that keeps (i, i).

    Args:
        w_q: W^Q, one D × d matrix per head.
        w_k: W^K, one D × d matrix per head; need not be tied.
        w_v: W^V, one D × d_v matrix per head.
        g: output maps G_h, every constant folded in.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound.

    Raises:
        ValueError: ``visible`` does not fit the heads.

    Source: ours, docs/numerics.md.
    """
    return one_input_per_head(_anchored_gains(w_q, w_k, w_v, visible), g)


def anchored_causal_bound(
    w_q: Float[Tensor, "heads width d_head"],
    w_v: Float[Tensor, "heads width d_value"],
    g: Float[Tensor, "heads d_value width_out"],
    visible: Visible,
) -> float:
    """sup ‖∂F_i/∂x_i‖₂ of causal anchored attention: L_h = σ_V + 2 σ_Q √g(n_h) d^{−1/4} per head.

    As :func:`anchored_token_max_bound`, but earlier keys are constants in the argument, so W^K does
    not enter. Not a Lipschitz constant of F.

    Args:
        w_q: W^Q, one D × d matrix per head.
        w_v: W^V, one D × d_v matrix per head.
        g: output maps G_h, every constant folded in.
        visible: number of tokens N in the fullest row, or log n_h per head (float64).

    Returns:
        The bound.

    Raises:
        ValueError: ``visible`` does not fit the heads.

    Source: ours, docs/numerics.md.
    """
    return one_input_per_head(_anchored_gains(w_q, None, w_v, visible), g)


def causal_gain_bounds(visible: Visible, num_heads: int) -> list[float]:
    """κ_h = 1 + 2 W₀(n_h e^{−3/2}) ≥ ‖∂Y_i^h/∂q_i^h‖₂ per head, rounded up.

    ‖P_ii I + (2/√d) C_i‖₂ ≤ (1 + 2 Σ_{j ≠ i} s_j e^{b_j − s_j})/(1 + Σ_{j ≠ i} e^{b_j − s_j}), at
    its largest where every s_j = 3/2 + W₀(n e^{−3/2}).

    Args:
        visible: number of tokens N in a row (n = N − 1), or log n_h of each head, or of all in one.
        num_heads: H.

    Returns:
        H numbers.

    Raises:
        ValueError: log masses in another dtype or shape.

    Source: ours, docs/numerics.md.
    """
    if isinstance(visible, int):
        return [causal_gain_upper(visible - 1)] * num_heads
    return [causal_gain_upper_from_log(m) for m in log_mass_bounds(visible, num_heads)]


def _anchored_gains(w_q: Tensor, w_k: Tensor | None, w_v: Tensor, visible: Visible) -> list[float]:
    """σ_V + 2 (σ_Q + σ_K) √g d^{−1/4} per head; without σ_K if the keys are held fixed."""
    query, value = spectral_norm_bound(w_q).tolist(), spectral_norm_bound(w_v).tolist()
    key = [0.0] * len(query) if w_k is None else spectral_norm_bound(w_k).tolist()
    # (g/√d)^{1/2}: the root-mean-square distance of a row, in units where the logit is its square.
    inverse_root_d = sqrt_up(quotient_up(1, w_q.shape[-1]))
    distances = [
        sqrt_up(product_up(u, inverse_root_d)) for u in mean_gap_bounds(visible, len(query))
    ]
    return [
        sum_up(v, product_up(2, sum_up(q, k), distance))
        for q, k, v, distance in zip(query, key, value, distances, strict=True)
    ]


def one_input_per_head(gains: list[float], g: Tensor) -> float:
    """‖Σ_h G_hᵀ y_h‖ ≤ ‖[a_h G_h/w_h]_h‖₂ √(Σ_h w_h²) for any y_h with ‖y_h‖ ≤ a_h."""
    heads = zip(gains, spectral_norm_bound(g).tolist(), strict=True)
    by_size = [math.sqrt(a * out) for a, out in heads]
    bounds = []
    for weights in (_usable([1.0] * len(gains)), _usable(by_size)):
        scales = [quotient_up(a, w) for a, w in zip(gains, weights, strict=True)]
        total = sqrt_up(sum_up(*(product_up(w, w) for w in weights)))
        bounds.append(product_up(_scaled_norm(scales, g, stack=-2), total))
    return min(bounds)


def one_input_for_all(
    gains: list[float], w: Tensor, g: Tensor, known: list[float] | None = None
) -> float:
    """‖Σ_h G_hᵀ B_h W_hᵀ‖₂ ≤ ‖[s_h G_h]_h‖₂ ‖[(a_h/s_h) W_h]_h‖₂ for any B_h with ‖B_h‖₂ ≤ a_h.

    ``known`` are weights s_h to try besides a_h‖W_h‖₂ and the like. Heads with W_h = 0 are left
    out, whatever their G_h.
    """
    sizes = spectral_norm_bound(w).tolist()
    heard = [h for h, size in enumerate(sizes) if size != 0]
    if len(heard) < len(sizes):
        known = None if known is None else [known[h] for h in heard]
        gains, w, g = [gains[h] for h in heard], w[heard], g[heard]
        return one_input_for_all(gains, w, g, known) if heard else 0.0
    before = [a * q for a, q in zip(gains, sizes, strict=True)]
    heads = zip(before, spectral_norm_bound(g).tolist(), strict=True)
    by_size = [math.sqrt(a / out) if out else math.inf for a, out in heads]
    bounds = []
    for weights in (before, by_size, *([] if known is None else [known])):
        usable = _usable(weights)
        scales = [quotient_up(a, s) for a, s in zip(gains, usable, strict=True)]
        after, stacked = _scaled_norm(usable, g, stack=-2), _scaled_norm(scales, w, stack=-1)
        bounds.append(product_up(after, stacked))
    return min(bounds)


def _scaled_norm(scales: list[float], blocks: Tensor, stack: int) -> float:
    """‖[a_h W_h]_h‖₂ from above, blocks side by side (stack = −1) or on top of each other (−2).

    Scaling rounds every entry by at most 2⁻⁵³ of itself, so it moves ‖·‖₂ by at most 2⁻⁵³ ‖·‖_F,
    which is at most 2⁻⁵³ √rank ‖·‖₂.
    """
    scale = blocks.new_tensor(scales, dtype=torch.float64)[:, None, None]
    joined = torch.cat((blocks.detach().to(torch.float64) * scale).unbind(0), dim=stack)
    return round_up(spectral_norm_bound(joined).item(), 1 + math.isqrt(min(joined.shape)))


def _usable(weights: list[float]) -> list[float]:
    """Positive and finite: within 1e250 of the largest finite one. Any such weights are valid.

    A head whose input map is zero or nearly so has an output map that was divided by it: weights of
    such heads are far below the others, and have to stay there.
    """
    largest = max((w for w in weights if 0 < w < math.inf), default=1.0)
    return [min(max(w, 1e-250 * largest), 1e250 * largest) for w in weights]
