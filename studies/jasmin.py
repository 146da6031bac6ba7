"""Bounds and regularisers from the softmax Jacobian S(p) = diag(p) − ppᵀ.

Yudin, Gaponov, Kudriashov & Rakhuba 2025, *Pay Attention to Attention Distribution: A New Local
Lipschitz Bound for Transformers* (JaSMin), arXiv 2507.07814. With p sorted, p₁ ≥ p₂ ≥ …, the k-th
largest eigenvalue of S(p) is at most g_k(p) = p_k (1 − p_k + p_{k+1}), so ‖S(p)‖₂ ≤ g_1 ≤ ½.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.bounds.local import covariance
from invformer.numerics.spectral_norm import spectral_norm_bound


def softmax_jacobian_bound(
    p: Float[Tensor, "*batch tokens"], k: int = 1
) -> Float[Tensor, "*batch"]:
    """g_k(p) ≥ λ_k(diag(p) − ppᵀ), differentiable; zero if there are fewer than k entries.

    Source: Yudin et al. 2025, Corollary 1 (k = 1); the proof for every k is in docs/numerics.md.
    """
    if k > p.shape[-1]:
        return torch.zeros_like(p[..., 0])
    largest = p.topk(min(k + 1, p.shape[-1]), dim=-1).values
    following = largest[..., k] if k < p.shape[-1] else torch.zeros_like(p[..., 0])
    return largest[..., k - 1] * (1 - largest[..., k - 1] + following)


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
    Source: Yudin et al. 2025, Theorem 3; ``centred`` is ours.
    """
    x, p = x.double(), p.double()
    length = spectral_norm_bound(x)
    centred = spectral_norm_bound(x - x.mean(-2, keepdim=True)) if form == "centred" else length
    reaction = softmax_jacobian_bound(p).amax(-1) * spectral_norm_bound(a)
    reach = (centred.square() + length * centred).unsqueeze(-1)
    bound = spectral_norm_bound(w_v) * (spectral_norm_bound(p) + reach * reaction)
    return bound * (1 + 1e-13 * sum(x.shape[-2:]))


def jasmin_regulariser(
    p: Float[Tensor, "*batch heads tokens tokens"], k: int = 0
) -> Float[Tensor, ""]:
    """JaSMin_k: log g_1(P_i) (k = 0) or log(g_1(P_i)/g_k(P_i)) (k > 0), averaged.

    The mean over rows stands for the published maximum, and the first k + 1 rows are left out:
    under a causal mask short prefixes have no g_k, and two equal weights have the largest g_1.
    JaSMin_0 is bistable: a row with p₁ > (1 + p₂)/2 is driven to one-hot, not to uniform.
    Source: Yudin et al. 2025, Eqs. 8 and 9.
    """
    rows = p[..., k + 1 :, :].clamp_min(1e-12)
    rows = rows / rows.sum(-1, keepdim=True)
    value = softmax_jacobian_bound(rows).log()
    if k > 0:
        value = value - softmax_jacobian_bound(rows, k).log()
    return value.mean(-1).mean()


def sensitivity_regulariser(
    q: Float[Tensor, "*batch heads tokens d_head"],
    p: Float[Tensor, "*batch heads tokens tokens"],
    w_q: Float[Tensor, "heads width d_head"],
) -> Float[Tensor, ""]:
    """Mean of the query and key terms of tied L2 attention's ``fast`` local bound; differentiable.

    Small iff the attention weights hardly react to the input. It follows the true size of that
    reaction (rank correlation 0.97; JaSMin_0: 0.18) because it sees lengths and weights too (ours).
    """
    query, key = query_and_key_terms(q, p, w_q)
    return (query + key).mean()


def query_and_key_terms(
    q: Float[Tensor, "*batch heads tokens d_head"],
    p: Float[Tensor, "*batch heads tokens tokens"],
    w_q: Float[Tensor, "heads width d_head"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """The query and key terms of (Y^h)_h from above (frobenius), with s = √d, to rounding.

    query = (2/s) max_i (Σ_h ‖W_h C_i^h‖_F²)^½
    key   = (2/s) max_j (Σ_h Σ_i P_ij^h ‖C_i^h‖_F ‖W_h(q_j − q_i)‖²)^½

    Both vanish where the attention weights do not react to the input.
    """
    q, scale = q - q[..., :1, :], 2 / math.sqrt(q.shape[-1])
    c = covariance(p, q, q)  # C_i, (*batch, H, N, d, d)
    query = torch.linalg.matrix_norm(w_q.unsqueeze(-3) @ c).square()
    z = q @ w_q.mT
    square = z.square().sum(-1)
    distance = square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * z @ z.mT
    key = p * torch.linalg.matrix_norm(c).unsqueeze(-1) * distance.clamp_min(0)
    tiny = torch.finfo(q.dtype).tiny  # the square root is then differentiable at zero
    return (
        scale * query.sum(-2).amax(-1).clamp_min(tiny).sqrt(),
        scale * key.sum((-3, -2)).amax(-1).clamp_min(tiny).sqrt(),
    )
