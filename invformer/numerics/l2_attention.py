"""The tied L2 attention core in q-space, shared by layers, estimators and bounds.

Per head, with keys, queries and values the same tensor q ∈ R^{N×d} (rows are tokens):

    S_ij = −‖q_i − q_j‖²/√d + b_ij,    P = softmax_j S,    Y = P q

In every function q are the queries, p their attention weights, and a bias is added to the logits:
−∞ hides (i, j), which (i, i) never is. Any leading dimensions are batch dimensions; memory is O(N²)
per head.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.numerics.precision import at_least_single, without_autocast

# Queries, keys or values of every head; attention weights; what is added to the logits.
PerHead = Float[Tensor, "*batch heads tokens d_head"]
AttentionWeights = Float[Tensor, "*batch heads tokens tokens"]
DenseBias = Float[Tensor, "#heads tokens tokens"]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(*batch, N, H d) → (*batch, H, N, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


def merge_heads(y: Tensor) -> Tensor:
    """(*batch, H, N, d) → (*batch, N, H d); of the matrices of all heads [W_1, …, W_H]."""
    return y.transpose(-2, -3).flatten(-2)


def attention_weights(q: PerHead, bias: DenseBias | None = None) -> AttentionWeights:
    """P = softmax_j(−‖q_i − q_j‖²/√d + b_ij), in float32 at least.

    ‖q_i‖² is constant in j, which softmax ignores: the logits are (2 q_i·q_j − ‖q_j‖²)/√d + b_ij.
    This expansion cancels badly in half precision, hence the float32 floor, also under autocast.
    """
    with without_autocast(q.device):
        q = at_least_single(q)
        # Distances ignore a common shift, rounding does not. Not the mean: through it, later tokens
        # would change the rounding of earlier rows.
        k = q - q[..., :1, :]
        return row_weights(k, with_lengths(k), bias)


def with_lengths(
    k: Float[Tensor, "*batch tokens d_head"],
) -> Float[Tensor, "*batch tokens d_head_and_one"]:
    """[k_j, −‖k_j‖²/√d], in float32 at least: what queries are multiplied by for their logits.

    The length as one more channel is cheaper than another pass over N² logits.
    """
    with without_autocast(k.device):
        k = at_least_single(k)
        lengths = torch.linalg.vecdot(k, k).unsqueeze(-1) / -math.sqrt(k.shape[-1])
        return torch.cat([k, lengths], -1)


def row_weights(
    queries: Float[Tensor, "*batch heads rows d_head"],
    keys: Float[Tensor, "*batch heads tokens d_head_and_one"],
    bias: Float[Tensor, "#heads rows tokens"] | None,
) -> Float[Tensor, "*batch heads rows tokens"]:
    """Rows of P, from queries and from keys with their lengths, relative to one origin."""
    with without_autocast(queries.device):
        scale = 2 / math.sqrt(queries.shape[-1])
        queries = F.pad(scale * queries.to(keys.dtype), (0, 1), value=1.0)  # [2 q_i/√d, 1]
        logits = queries @ keys.mT  # 2 q_i·k_j/√d − ‖k_j‖²/√d
        return (logits if bias is None else logits + bias).softmax(-1)


def l2_attention(q: PerHead, bias: DenseBias | None = None) -> PerHead:
    """Y = P q, the output of every head before its output map."""
    p = attention_weights(q, bias)
    return (p @ q.to(p.dtype)).to(q.dtype)
