"""Bounds and regularisers from the softmax Jacobian S(p) = diag(p) − ppᵀ.

Yudin, Gaponov, Kudriashov & Rakhuba 2025, *Pay Attention to Attention Distribution: A New Local
Lipschitz Bound for Transformers* (JaSMin), arXiv 2507.07814. With p sorted, p₁ ≥ p₂ ≥ …, the k-th
largest eigenvalue of S(p) is at most g_k(p) = p_k (1 − p_k + p_{k+1}), so ‖S(p)‖₂ ≤ g_1 ≤ ½.
"""

from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches.heads import InputMaps
from invformer.numerics.l2_attention import AttentionWeights
from invformer.numerics.norms import Tokens
from invformer.numerics.spectral_norm import spectral_norm_bound


def softmax_jacobian_bound(
    p: Float[Tensor, "*batch tokens"], k: int = 1
) -> Float[Tensor, "*batch"]:
    """g_k(p) ≥ λ_k(diag(p) − ppᵀ), differentiable; zero if there are fewer than k entries.

    Source: Yudin et al. 2025, Corollary 1 (k = 1); the proof for every k is in docs/numerics.md.
    """
    p = nn.functional.pad(p, (0, k + 1))  # entries that there are not are zero
    kth, following = p.topk(k + 1, dim=-1).values[..., k - 1 :].unbind(-1)
    return kth * (1 - kth + following)


def attention_bound(
    x: Tokens, p: AttentionWeights, a: Float[Tensor, "heads width width"], w_v: InputMaps
) -> Float[Tensor, "*batch heads"]:
    """‖∂(P^h X W_h^V)/∂X‖ in ``frobenius`` for dot-product heads with logits X A_h Xᵀ, from above.

    ‖W^V‖ (‖P‖ + 2‖X‖² ‖A‖ max_i g_1(P_i)). Any mask. Loose: 1 to 800 times.
    Source: Yudin et al. 2025, Theorem 3.
    """
    x, p = x.double(), p.double()
    reaction = softmax_jacobian_bound(p).amax(-1) * spectral_norm_bound(a)
    reach = 2 * spectral_norm_bound(x).square().unsqueeze(-1)
    bound = spectral_norm_bound(w_v) * (spectral_norm_bound(p) + reach * reaction)
    return bound * (1 + 1e-13 * sum(x.shape[-2:]))


def jasmin_regulariser(p: AttentionWeights, k: int = 0) -> Float[Tensor, ""]:
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
