"""Local bounds and regularisers from the softmax Jacobian.

Yudin, Gaponov, Kudriashov & Rakhuba 2025, *Pay Attention to Attention Distribution: A New Local
Lipschitz Bound for Transformers* (JaSMin), arXiv 2507.07814. The Jacobian of softmax is
S(p) = diag(p) − ppᵀ; with p sorted, p₁ ≥ p₂ ≥ …, its k-th largest eigenvalue obeys

    λ_k ≤ g_k(p) = p_k (1 − p_k + p_{k+1}),    ‖S(p)‖₂ = λ_1 ≤ g_1 ≤ ½

with λ_1 = g_1 if all smaller positive entries are equal. The largest g_1/λ_1 known is 4 − 2√2.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds.local import query_and_key_terms
from invformer.numerics.spectral_norm import spectral_norm_bound

# Bisection halves an interval inside [0, 1]: float64 is exhausted after so many steps.
BISECTION_STEPS = 60


def softmax_jacobian_bound(
    p: Float[Tensor, "*batch tokens"], k: int = 1
) -> Float[Tensor, "*batch"]:
    """g_k(p) = p_k (1 − p_k + p_{k+1}) ≥ λ_k(diag(p) − ppᵀ), p sorted downwards; differentiable.

    Args:
        p: probabilities.
        k: which eigenvalue, 1 for the norm.

    Returns:
        g_k; zero if there are fewer than k entries.

    Raises:
        ValueError: k < 1.

    Source:
        Yudin et al. 2025, Corollary 1 (k = 1); the proof for every k is in docs/numerics.md.
    """
    if k < 1:
        raise ValueError(f"eigenvalues count from 1, got k = {k}")
    if k > p.shape[-1]:
        return torch.zeros_like(p[..., 0])
    largest = p.topk(min(k + 1, p.shape[-1]), dim=-1).values
    following = largest[..., k] if k < p.shape[-1] else torch.zeros_like(p[..., 0])
    return largest[..., k - 1] * (1 - largest[..., k - 1] + following)


def softmax_jacobian_norm(p: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch"]:
    """‖diag(p) − ppᵀ‖₂: the root λ ∈ [p₂, p₁] of Σ_i p_i²/(p_i − λ) = 1, by bisection.

    The sum increases from −∞ to ∞ between the two largest entries. A fixed number of steps, no
    eigenproblem; the upper end is returned.

    Args:
        p: probabilities.

    Returns:
        λ_1, to rounding.
    """
    if p.shape[-1] == 1:
        return torch.zeros_like(p[..., 0])
    high, low = p.topk(2, dim=-1).values.unbind(-1)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        gap = p - middle.unsqueeze(-1)
        is_above = torch.where(gap == 0, 0, p.square() / gap).sum(-1) > 1
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return high


def attention_bound(
    x: Float[Tensor, "*batch tokens width"],
    p: Float[Tensor, "*batch heads tokens tokens"],
    a: Float[Tensor, "heads width width"],
    w_v: Float[Tensor, "heads width d_head"],
    form: Literal["paper", "centred"] = "centred",
) -> Float[Tensor, "*batch heads"]:
    """‖∂(P^h X W_h^V)/∂X‖ in ``frobenius`` for dot-product heads with logits X A_h Xᵀ, from above.

    ``paper``: ‖W^V‖ (‖P‖ + 2‖X‖² ‖A‖ max_i g_1(P_i)). ``centred`` has ‖X_c‖² + ‖X‖‖X_c‖ for 2‖X‖²,
    X_c the tokens minus their mean: rows of dP sum to zero. Any mask. Loose: 1 to 800 times.

    Args:
        x: tokens.
        p: attention weights.
        a: A_h = W^Q_h W^K_hᵀ/√d.
        w_v: W^V_h, rows are inputs.
        form: which of the two.

    Returns:
        One bound per head (join them by :func:`invformer.bounds.castin.multi_head_bound`).

    Source:
        Yudin et al. 2025, Theorem 3; ``centred`` is ours.
    """
    x, p = x.double(), p.double()
    length = spectral_norm_bound(x)
    centred = spectral_norm_bound(x - x.mean(-2, keepdim=True)) if form == "centred" else length
    reaction = softmax_jacobian_bound(p).amax(-1) * spectral_norm_bound(a)
    reach = (centred.square() + length * centred).unsqueeze(-1)
    bound = spectral_norm_bound(w_v) * (spectral_norm_bound(p) + reach * reaction)
    return bound * (1 + 1e-13 * sum(x.shape[-2:]))


def jasmin_regulariser(
    p: Float[Tensor, "*batch heads tokens tokens"],
    k: int = 0,
    row_reduction: Literal["max", "mean"] = "mean",
    num_skipped_rows: int | None = None,
) -> Float[Tensor, ""]:
    """JaSMin_k: log g_1(P_i) (k = 0) or log(g_1(P_i)/g_k(P_i)) (k > 0), over rows, then averaged.

    Averages over heads and batch; over layers is up to the caller. Two things to know. JaSMin_0 is
    bistable: a row with p₁ > (1 + p₂)/2 is driven to one-hot, not to uniform; k > 0 spreads every
    row tried. Under a causal mask the shortest prefixes saturate the maximum (two equal weights
    already give the largest g_1) and have no g_k: rows that see ≤ k + 1 tokens are skipped.

    Args:
        p: attention weights of one layer.
        k: 0, or how many leading weights should become equal.
        row_reduction: the published maximum over rows, or their mean.
        num_skipped_rows: leading rows left out; k + 1 by default, 0 for attention without a mask.

    Returns:
        A scalar to be added to the loss with some weight.

    Raises:
        ValueError: k is negative, or no row is left.

    Source:
        Yudin et al. 2025, Eqs. 8 and 9.
    """
    skipped = k + 1 if num_skipped_rows is None else num_skipped_rows
    if k < 0 or skipped >= p.shape[-2]:
        raise ValueError(
            f"JaSMin_{k} on {p.shape[-2]} rows with {skipped} skipped: needs k ≥ 0 and a row left"
        )
    rows = p[..., skipped:, :].clamp_min(1e-12)
    rows = rows / rows.sum(-1, keepdim=True)
    value = softmax_jacobian_bound(rows).log()
    if k > 0:
        value = value - softmax_jacobian_bound(rows, k).log()
    return (value.amax(-1) if row_reduction == "max" else value.mean(-1)).mean()


def sensitivity_regulariser(
    q: Float[Tensor, "*batch heads tokens d_head"],
    p: Float[Tensor, "*batch heads tokens tokens"],
    w_q: Float[Tensor, "heads width d_head"],
) -> Float[Tensor, ""]:
    """Mean of the query and key terms of tied L2 attention's ``fast`` local bound; differentiable.

    Small iff the attention weights hardly react to the input. It follows the true size of that
    reaction (rank correlation 0.97; JaSMin_0: 0.18) because it sees lengths and weights too.

    Args:
        q: queries X W_h.
        p: attention weights.
        w_q: W_h.

    Returns:
        A scalar to be added to the loss with some weight.

    Source:
        Ours, docs/numerics.md.
    """
    query, key = query_and_key_terms(q, p, w_q)
    return (query + key).mean()
