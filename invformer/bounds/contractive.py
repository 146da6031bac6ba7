"""Tied L2 attention F(X)_i = Σ_h Y_i^h G_h, Y^h = P^h q^h, q^h = X W_h: its constants (ours).

κ_h = 4 φ⁻¹(n_h) + 1 is the gain of one head (:mod:`.head_gain`), σ_h = ‖W_h‖₂. docs/numerics.md
has the proofs. Arguments of all functions:

    w_q      W_h as (heads, width, d_head)
    g        output maps G_h as (heads, d_head, width), every constant folded in
    visible  tokens in the fullest row, or log n_h per head in float64

Masks must keep the self token visible. Results are Python floats, proven, rounding included.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds.head_gain import Visible, diagonal_gains, head_gain, mean_gaps
from invformer.bounds.heads import InputMaps, OutputMaps, separate_inputs, shared_input
from invformer.bounds.layers import max_row_sum
from invformer.numerics.rounding import product_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound


def token_max_bound(w_q: InputMaps, g: OutputMaps, visible: Visible) -> float:
    """Lip(F) in token_max ≤ min_w ‖[κ_h σ_h G_h/w_h]_h‖₂ √(Σ_h w_h²).

    This is at most √H ‖Ĝ‖₂ where G_h = Ĝ_h/(κ_h σ_h), at any number of tokens.
    """
    gaps, query = mean_gaps(visible, len(w_q)), spectral_norm_bound(w_q).tolist()
    gains = [product_up(head_gain(gap), q) for gap, q in zip(gaps, query, strict=True)]
    return separate_inputs(gains, g)


def frobenius_bound(
    w_q: InputMaps, g: OutputMaps, log_mass: Float[Tensor, "#heads tokens"]
) -> float:
    """Lip(F) in frobenius ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(K_h/s_h) W_h]_h‖₂, K_h² = Σ_i κ_{h,i}².

    κ_{h,i} = 4 φ⁻¹(n_{h,i}) + 1 with the mass n_{h,i} that row i sees: ``log_mass`` is its
    logarithm for every row of the longest sequence, −∞ where a token sees only itself. K_h stands
    where Kim et al. have √N (4u + 1), and is smaller under a causal mask (docs/numerics.md §5).
    """
    rows = [mean_gaps(row, len(w_q)) for row in log_mass.unbind(-1)]
    gains = [
        sqrt_up(sum_up(*(product_up(k, k) for k in map(head_gain, head))))
        for head in zip(*rows, strict=True)
    ]
    return shared_input(gains, w_q, g)


def entry_max_bound(w_q: InputMaps, g: OutputMaps, visible: Visible) -> float:
    """Lip(F) in entry_max ≤ max_k Σ_h (4 √d u_h + 1) ‖W_hᵀ‖_∞ Σ_m |G_h|_mk, u_h = φ⁻¹(n_h).

    From the proof of Kim et al. 2021, Theorem 3.2, with each head's product kept together, output
    channel by output channel. Never above the printed form, typically two orders of magnitude
    below it.
    """
    gaps = mean_gaps(visible, len(w_q))
    brackets = (sum_up(product_up(4, sqrt_up(w_q.shape[-1]), u), 1) for u in gaps)
    gains = [product_up(a, max_row_sum(w.mT)) for a, w in zip(brackets, w_q, strict=True)]
    scale = torch.tensor(gains, dtype=torch.float64)[:, None, None]
    weighted = g.detach().double().cpu().abs() * scale
    # A chain of H d sums behind one product; inf · 0 is NaN, which rounds up to inf.
    return round_up(weighted.sum((0, 1)).amax().item(), weighted.shape[0] * weighted.shape[1] + 1)


def causal_bound(w_q: InputMaps, g: OutputMaps, visible: Visible) -> float:
    """sup ‖∂F_i/∂x_i‖₂ ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(κ_h/s_h) W_h]_h‖₂, κ_h = 1 + 2 W₀(n_h e^{−3/2}).

    The diagonal blocks of a causal Jacobian. If they are below one, x + F(x) can be inverted token
    by token. It is *not* a Lipschitz constant of F in any norm.
    """
    return shared_input(diagonal_gains(visible, len(w_q)), w_q, g)
