"""One head of tied L2 attention: its gain is at most 4 φ⁻¹(n) + 1 at every input.

    Y_i = Σ_j P_ij q_j,   P_i = softmax_j(b_ij − s_ij),   s_ij = ‖q_i − q_j‖²/√d,   b_ii = 0

n = Σ_{j ≠ i} e^{b_ij} is the mass of the other visible tokens: without a bias their number, N − 1.
g = φ⁻¹(n) solves g e^{g+1} = n. Rows of different lengths and masks enter by n alone.

**Lemma** (Kim et al. 2021, arXiv 2006.04710, Theorem 3.2; for equal masses). Σ_j P_ij s_ij ≤ g.

**Theorem** (ours). Σ_j ‖∂Y_i/∂q_j‖₂ ≤ 4 φ⁻¹(n) + 1 and ‖∂Y_i/∂q_i‖₂ ≤ 1 + 2 W₀(n e^{−3/2}).

The proofs (docs/numerics.md §3, §4, §6) bound the terms of the Jacobian, by the lemma:

    ∂Y_i/∂q_j = P_ij [I − (2/√d)(q_j − Y_i)(q_j − q_i)ᵀ] + δ_ij (2/√d) C_i,   C_i = Cov_{P_i}(q)

The constant of a layer, all heads together, is in :func:`.contractive.token_max_bound`.
"""

import math

import torch
from torch import Tensor

from invformer.numerics.lambert_w import causal_gain_upper, phi_inverse_upper
from invformer.numerics.rounding import product_up, sum_up

# The number of tokens N in the fullest row, or log n of each head (or one for all) in float64.
Visible = int | Tensor

# Added to log masses, which come from a float64 logsumexp: far above its rounding.
LOG_MASS_SLACK = 1e-9


def head_gain(mean_gap: float) -> float:
    """4 g + 1 ≥ Σ_j ‖∂Y_i/∂q_j‖₂, rounded up."""
    return sum_up(product_up(4, mean_gap), 1)


def mean_gaps(visible: Visible, num_heads: int) -> list[float]:
    """g = φ⁻¹(n) ≥ Σ_j P_ij s_ij of every head, rounded up."""
    return [phi_inverse_upper(log_n) for log_n in _log_masses(visible, num_heads)]


def diagonal_gains(visible: Visible, num_heads: int) -> list[float]:
    """1 + 2 W₀(n e^{−3/2}) ≥ ‖∂Y_i/∂q_i‖₂ of every head, rounded up."""
    return [causal_gain_upper(log_n) for log_n in _log_masses(visible, num_heads)]


def _log_masses(visible: Visible, num_heads: int) -> list[float]:
    """log n of every head, lifted above the rounding that it comes with."""
    if isinstance(visible, int):
        if visible < 1:
            raise ValueError(f"a token always sees itself: got {visible} visible tokens")
        log_n = -math.inf if visible == 1 else math.nextafter(math.log(visible - 1), math.inf)
        return [log_n] * num_heads
    if visible.dtype != torch.float64 or visible.shape not in {(1,), (num_heads,)}:
        raise ValueError(
            f"a certificate needs log masses in float64, one or {num_heads} of them, "
            f"got {visible.dtype} of shape {tuple(visible.shape)}"
        )
    return [log_n + LOG_MASS_SLACK for log_n in visible.detach().expand(num_heads).tolist()]
