"""Kim et al. 2021, arXiv 2006.04710, Theorem 3.2 as printed: tied L2 multi-head attention.

    F(X)_i = Σ_h Y_i^h G_h,   Y^h = P^h q^h,   q^h = X W^Q_h,   G_h = W^Q_hᵀ W^V_h W^O_h / √d
    P^h = softmax_j(−‖q_i − q_j‖²/√d + b_h(i − j))

The tie W^K = W^Q, a visible self token and the factor A_h = W^Q_h W^Q_hᵀ/√d in the value path are
assumptions: without any one of them the map is not Lipschitz. u is the largest φ⁻¹(n_h) of the
heads (``branches/tied_l2/bounds.py``); the paper has no bias, and n = N − 1. ‖·‖_∞
is the largest absolute row sum. Results are Python floats, proven, rounding included.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.heads import InputMaps
from invformer.branches.tied_l2.bounds import phi_inverses
from invformer.numerics.norms import row_sum_bound
from invformer.numerics.rounding import product_up, quotient_up, sqrt_up, sum_up


def log_mass_of(num_tokens: int) -> Float[Tensor, "one"]:
    """log(N − 1), in float64: without a bias."""
    return torch.tensor([num_tokens - 1.0], dtype=torch.float64).log()


def entry_max_bound(
    w_q: InputMaps, w_v: InputMaps, w_o: Float[Tensor, "width width_out"], log_mass: Tensor
) -> float:
    """Lip(F) in entry_max ≤ (4u + 1/√d) ‖W^Oᵀ‖_∞ max_h(‖W^Q_h‖_∞‖W^Q_hᵀ‖_∞) max_h‖W^V_hᵀ‖_∞."""
    u = max(phi_inverses(log_mass, len(w_q)))
    bracket = sum_up(product_up(4, u), sqrt_up(quotient_up(1, w_q.shape[-1])))
    query = max(product_up(row_sum_bound(w), row_sum_bound(w.mT)) for w in w_q)
    value = max(row_sum_bound(w.mT) for w in w_v)
    return product_up(bracket, row_sum_bound(w_o.mT), query, value)
