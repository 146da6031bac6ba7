"""The ``blocked`` kernel: causal attention with a bias of the lag, a block of queries at a time.

    Y = P V,   P = softmax_j S,   S_ij = q_i·k_j + b(i − j),   j ≤ i

It serves where ``native`` does not, on every device. P exists for one block at a time and is
computed again in the backward pass (Dao et al. 2022), so memory is linear in N.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Queries of a block: as many as have so many logits, within these.
BLOCK_ELEMENTS = 2**20
MOST_ROWS, LEAST_ROWS = 128, 64


def toeplitz(
    by_lag: Float[Tensor, "*masks heads tokens"], rows: int
) -> Float[Tensor, "*masks heads rows tokens"]:
    """The last ``rows`` rows of the matrix b(i − j), −∞ above the diagonal."""
    if rows == 1:
        return by_lag.flip(-1).unsqueeze(-2)
    reversed_lags = F.pad(by_lag.flip(-1), (0, rows - 1), value=-math.inf)
    # Contiguous: flip would keep the order of the strides, which is that of the transpose.
    return reversed_lags.unfold(-1, by_lag.shape[-1], 1).contiguous().flip(-2)


def sum_by_lag(t: Float[Tensor, "heads rows tokens"]) -> Float[Tensor, "heads tokens"]:
    """The adjoint of :func:`toeplitz`: sums along the diagonals."""
    heads, rows, tokens = t.shape
    # Rows one column longer than the distance of their entries: each moves one to the right.
    padded = F.pad(t.flip(-2), (0, rows)).flatten(1)[:, : rows * (tokens + rows - 1)]
    return padded.view(heads, rows, -1).sum(1)[:, :tokens].flip(-1)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor) -> Tensor:
    """softmax(q kᵀ + b(i − j)) v; causal, all (B, H, N, d), values perhaps of another d."""
    batch, heads, tokens, _ = q.shape
    rows = BLOCK_ELEMENTS // max(1, batch * heads * tokens)
    rows = min(tokens, max(LEAST_ROWS, min(MOST_ROWS, rows)))
    bias, parts, (q, k, v) = toeplitz(by_lag, rows), [], (t.flatten(0, 1) for t in (q, k, v))
    for begin in range(0, tokens, rows):
        end = min(tokens, begin + rows)
        seen = k[:, :end], v[:, :end], bias[:, begin - end :, tokens - end :]
        block = q[:, begin:end]
        if torch.is_grad_enabled():
            y = checkpoint(attended, block, *seen, use_reentrant=False, preserve_rng_state=False)
            parts.append(y)
        else:
            parts.append(attended(block, *seen))
    return torch.cat(parts, -2).unflatten(0, (batch, heads))


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q kᵀ + b) v of some queries; q, k, v of pairs of sample and head, b of heads."""
    logits = torch.baddbmm(bias.repeat(len(q) // len(bias), 1, 1), q, k.mT)
    return logits.softmax(-1) @ v
