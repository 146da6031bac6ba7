"""The ``blocked`` kernel: causal attention with a bias of the lag, a block of queries at a time.

    Y = P V,   P = softmax_j S,   S_ij = q_i·k_j + b(i − j),   j ≤ i

It serves where ``native`` does not, on every device. P exists for one block at a time and is
computed again in the backward pass (Dao et al. 2022), so memory is linear in N.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.kernels.native_attention import refuse_tangents

# Logits held at a time: 2 MiB of float32, the second-level caches of two cores. Elsewhere 64 MiB:
# there a call has to be large (not measured).
BLOCK_ELEMENTS, BLOCK_ELEMENTS_ON_ACCELERATOR = 2**19, 2**24
MOST_ROWS, LEAST_ROWS = 64, 32


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


class Logits(NamedTuple):
    """The parts of S: queries and keys (pairs of sample and head, N, d), and the last rows of the
    Toeplitz matrix b (H, rows, N)."""

    q: Tensor
    k: Tensor
    bias: Tensor

    def heads(self, pairs: slice) -> Tensor:
        """The head of each pair."""
        return torch.arange(pairs.start, pairs.stop, device=self.q.device) % len(self.bias)

    def weights(self, pairs: slice, begin: int, end: int) -> Tensor:
        """P of some pairs and the queries begin … end − 1, (pairs, queries, end)."""
        bias = self.bias[:, begin - end :, self.bias.shape[-1] - end :]
        p = bias.index_select(0, self.heads(pairs))
        p.baddbmm_(self.q[pairs, begin:end], self.k[pairs, :end].mT)
        torch.softmax(p, -1, out=p)
        # Weights that round to nothing, before products with them leave the normal numbers: those
        # cost a hundred times as much, and steep biases make many. Gradients are small themselves,
        # so that the threshold is the square root of the smallest normal number.
        return torch.threshold_(p, math.sqrt(torch.finfo(p.dtype).tiny), 0.0)


def _rows(q: Tensor) -> int:
    """The number of queries in a block of (pairs, N, d)."""
    rows = max(LEAST_ROWS, min(MOST_ROWS, _elements(q) // q.shape[1]))
    # Below two blocks there is no hidden half to skip that would pay for more calls.
    return q.shape[1] if q.shape[1] <= 2 * rows else rows


def _blocks(q: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Pairs of sample and head and the range of queries of each block."""
    (num_pairs, tokens, _), rows = q.shape, _rows(q)
    step = max(1, _elements(q) // (rows * tokens))
    for first in range(0, num_pairs, step):
        # From the end: all blocks except the first are full, and the last sees all keys.
        for end in range(tokens, 0, -rows):
            yield slice(first, min(first + step, num_pairs)), max(0, end - rows), end


def _elements(q: Tensor) -> int:
    return BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS_ON_ACCELERATOR


def _logits(q: Tensor, k: Tensor, by_lag: Tensor) -> Logits:
    """From (B, H, N, d) to pairs."""
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    return Logits(q, k, toeplitz(by_lag, _rows(q)))


@torch.library.custom_op("invformer::blocked_attention", mutates_args=())
def blocked_attention(q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor) -> Tensor:
    """softmax(q kᵀ + b(i − j)) v; causal, all (B, H, N, d), values perhaps of another d."""
    logits, values = _logits(q, k, by_lag), v.flatten(0, 1)
    y = torch.empty_like(values)
    for pairs, begin, end in _blocks(logits.q):
        y[pairs, begin:end] = logits.weights(pairs, begin, end) @ values[pairs, :end]
    return y.view(v.shape)


@torch.library.custom_op("invformer::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and by_lag: dS = P∘(dY Vᵀ − rowsum(P∘dY Vᵀ))."""
    logits, values, outer = _logits(q, k, by_lag), v.flatten(0, 1), dy.flatten(0, 1)
    dq, dk, dv = (torch.zeros_like(t) for t in (logits.q, logits.k, values))
    dbias = torch.zeros_like(logits.bias)
    for pairs, begin, end in _blocks(logits.q):
        p, g = logits.weights(pairs, begin, end), outer[pairs, begin:end]
        ds = g @ values[pairs, :end].mT
        torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)  # type: ignore
        # Products into a part of each matrix are one call per matrix: slower than a sum apart.
        dq[pairs, begin:end] += ds @ logits.k[pairs, :end]
        dk[pairs, :end] += ds.mT @ logits.q[pairs, begin:end]
        dv[pairs, :end] += p.mT @ g
        part = dbias[:, begin - end :, dbias.shape[-1] - end :]
        part.index_add_(0, logits.heads(pairs), ds)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), sum_by_lag(dbias)


@blocked_attention.register_fake
def _(q, k, v, by_lag):
    return v.new_empty(v.shape)


@blocked_attention_backward.register_fake
def _(dy, q, k, v, by_lag):
    return *(t.new_empty(t.shape) for t in (q, k, v)), torch.empty_like(by_lag)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    refuse_tangents(dy)
    return blocked_attention_backward(dy, *ctx.saved_tensors)


blocked_attention.register_autograd(_backward, setup_context=_keep)
