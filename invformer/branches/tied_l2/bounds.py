"""Tied L2 attention at every input: the gain of one head, and the constants of layers (ours).

    Y_i = Σ_j P_ij q_j,   P_i = softmax_j(b_ij − s_ij),   s_ij = ‖q_i − q_j‖²/√d,   b_ii = 0

n = Σ_{j ≠ i} e^{b_ij} is the mass of the other visible tokens: without a bias their number, N − 1.
u = φ⁻¹(n) solves u e^{u+1} = n. Rows of different lengths and masks enter by n alone; masks must
keep the self token visible.

**Lemma** (Kim et al. 2021, arXiv 2006.04710, Theorem 3.2; for equal masses). Σ_j P_ij s_ij ≤ u.

**Theorem** (ours). Σ_j ‖∂Y_i/∂q_j‖₂ ≤ 4 φ⁻¹(n) + 1 and ‖∂Y_i/∂q_i‖₂ ≤ 1 + 2 W₀(n e^{−3/2}).

The proofs (docs/numerics.md §3, §4, §6) bound the terms of the Jacobian, by the lemma:

    ∂Y_i/∂q_j = P_ij [I − (2/√d)(q_j − Y_i)(q_j − q_i)ᵀ] + δ_ij (2/√d) C_i,   C_i = Cov_{P_i}(q)

A layer is F(X)_i = Σ_h Y_i^h G_h with q^h = X W_h and σ_h = ‖W_h‖₂. Each function bounds several
layers in one call, which launches fewer kernels than a call for each. Arguments:

    w_q      W_h as (layers, heads, width, d_head)
    g        output maps G_h as (layers, heads, d_head, width), every constant folded in
    log_mass log n_h of the fullest row of each head, or one for all, in float64: (layers, #heads)

Results are Python floats, proven, rounding included.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.heads import InputMaps, OfHeads, OutputMaps, separate_inputs, shared_input
from invformer.numerics.lambert_w import causal_gain_upper, phi_inverse_upper
from invformer.numerics.norms import row_sum_bound
from invformer.numerics.rounding import product_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

# Added to log masses, which come from a float64 logsumexp: far above its rounding. Those of huge
# position biases are rounded relative to their size, N times.
LOG_MASS_SLACK, RELATIVE_SLACK = 1e-9, 1e-10


def phi_inverses(log_mass: Tensor, num_heads: int) -> list[float]:
    """u = φ⁻¹(n) ≥ Σ_j P_ij s_ij of every head."""
    return [phi_inverse_upper(log_n) for log_n in _log_masses(log_mass, num_heads)]


def head_gains(log_mass: Tensor, num_heads: int) -> list[float]:
    """4 φ⁻¹(n) + 1 ≥ Σ_j ‖∂Y_i/∂q_j‖₂ of every head."""
    return [sum_up(product_up(4, u), 1) for u in phi_inverses(log_mass, num_heads)]


def diagonal_gains(log_mass: Tensor, num_heads: int) -> list[float]:
    """1 + 2 W₀(n e^{−3/2}) ≥ ‖∂Y_i/∂q_i‖₂ of every head."""
    return [causal_gain_upper(log_n) for log_n in _log_masses(log_mass, num_heads)]


def token_max_bounds(w_q: InputMaps, g: OutputMaps, log_mass: Tensor) -> list[float]:
    """Lip(F) in token_max ≤ min_w ‖[κ_h σ_h G_h/w_h]_h‖₂ √(Σ_h w_h²), κ_h = 4 φ⁻¹(n_h) + 1.

    This is at most √H ‖Ĝ‖₂ where G_h = Ĝ_h/(κ_h σ_h), at any number of tokens.
    """
    sigmas, outputs = spectral_norm_bound(torch.stack([w_q.mT, g])).tolist()
    kappas = _of_layers(head_gains, w_q, log_mass)
    gains = [list(map(product_up, *of_layer)) for of_layer in zip(kappas, sigmas, strict=True)]
    return separate_inputs(gains, g, outputs)


def frobenius_bounds(
    w_q: InputMaps, g: OutputMaps, log_mass: Float[Tensor, "layers #heads tokens"]
) -> list[float]:
    """Lip(F) in frobenius ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(K_h/s_h) W_h]_h‖₂, K_h² = Σ_i κ_{h,i}².

    κ_{h,i} = 4 φ⁻¹(n_{h,i}) + 1 with the mass n_{h,i} that row i sees: ``log_mass`` is its
    logarithm for every row of the longest sequence, −∞ where a token sees only itself. K_h stands
    where Kim et al. have √N (4u + 1), and is smaller under a causal mask (docs/numerics.md §5).
    """

    def gains(rows: Tensor, num_heads: int) -> list[float]:
        of_heads = zip(*(head_gains(row, num_heads) for row in rows.unbind(-1)), strict=True)
        return [sqrt_up(sum_up(*map(product_up, kappas, kappas))) for kappas in of_heads]

    return shared_input(_of_layers(gains, w_q, log_mass), w_q, g)


def entry_max_bounds(w_q: InputMaps, g: OutputMaps, log_mass: Tensor) -> list[float]:
    """Lip(F) in entry_max ≤ max_k Σ_h (4 √d u_h + 1) ‖W_hᵀ‖_∞ Σ_m |G_h|_mk, u_h = φ⁻¹(n_h).

    From the proof of Kim et al. 2021, Theorem 3.2, with each head's product kept together, output
    channel by output channel. Never above the printed form, typically two orders of magnitude
    below it.
    """

    def bound(gaps: list[float], w_q: Tensor, g: Tensor) -> float:
        brackets = (sum_up(product_up(4, sqrt_up(w_q.shape[-1]), u), 1) for u in gaps)
        gains = [product_up(a, row_sum_bound(w.mT)) for a, w in zip(brackets, w_q, strict=True)]
        scale = torch.tensor(gains, dtype=torch.float64)[:, None, None]
        weighted = g.detach().double().cpu().abs() * scale
        # A chain of H d sums behind one product; inf · 0 is NaN, which rounds up to inf.
        return round_up(weighted.sum((0, 1)).amax().item(), len(gains) * w_q.shape[-1] + 1)

    return list(map(bound, _of_layers(phi_inverses, w_q, log_mass), w_q, g))


def causal_bounds(w_q: InputMaps, g: OutputMaps, log_mass: Tensor) -> list[float]:
    """sup ‖∂F_i/∂x_i‖₂ ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(κ′_h/s_h) W_h]_h‖₂.

    κ′_h = 1 + 2 W₀(n_h e^{−3/2}). If the diagonal blocks of a causal Jacobian are below one,
    x + F(x) can be inverted token by token. It is *not* a Lipschitz constant of F in any norm.
    """
    return shared_input(_of_layers(diagonal_gains, w_q, log_mass), w_q, g)


def _of_layers(
    gains: Callable[[Tensor, int], list[float]], w_q: InputMaps, log_mass: Tensor
) -> OfHeads:
    """The gains of every head of every layer."""
    return [gains(of_layer, w_q.shape[1]) for of_layer in log_mass]


def _log_masses(log_mass: Tensor, num_heads: int) -> list[float]:
    """log n of every head, lifted above the rounding that it comes with."""
    if log_mass.dtype != torch.float64 or log_mass.shape not in {(1,), (num_heads,)}:
        raise ValueError(
            f"a certificate needs log masses in float64, one or {num_heads} of them, "
            f"got {log_mass.dtype} of shape {tuple(log_mass.shape)}"
        )
    each = log_mass.detach().expand(num_heads).tolist()
    return [max(log_n + LOG_MASS_SLACK, log_n * (1 + RELATIVE_SLACK)) for log_n in each]
