"""The ``blocked`` kernel: causal attention with a bias of the lag, a block of queries at a time.

Forward and backward of :func:`.attention_kernel.attend` on a CPU, in memory linear in N beyond the
length up to which the weights are kept (Dao et al. 2022 describe the recomputation).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# Logits held at a time: 2 MiB of float32, the second-level caches of two cores.
BLOCK_ELEMENTS = 2**19
MOST_ROWS, LEAST_ROWS = 64, 32
# P is kept for the backward pass up to a length of so many times the channels of a head: it is then
# no larger than the rest of what a residual block keeps, about 14 numbers per token and channel.
KEPT_PER_CHANNEL = 8


def toeplitz(
    by_lag: Float[Tensor, "heads tokens"], rows: int
) -> Float[Tensor, "heads rows tokens"]:
    """The last ``rows`` rows of the matrix b(i − j), −∞ above the diagonal."""
    if rows == 1:
        return by_lag.flip(-1).unsqueeze(-2)
    reversed_lags = F.pad(by_lag.flip(-1), (0, rows - 1), value=-math.inf)
    # Contiguous: flip would keep the order of the strides, which is that of the transpose.
    return reversed_lags.unfold(-1, by_lag.shape[-1], 1).contiguous().flip(-2)


def sum_by_lag(
    t: Float[Tensor, "heads rows tokens"],
) -> Float[Tensor, "heads tokens"]:
    """The adjoint of :func:`toeplitz`: sums along the diagonals."""
    heads, rows, tokens = t.shape
    # One more column per row than the row is apart from the next: each row moves one to the right.
    padded = F.pad(t.flip(-2), (0, rows)).flatten(1)[:, : rows * (tokens + rows - 1)]
    return padded.view(heads, rows, -1).sum(1)[:, :tokens].flip(-1)


@dataclass(frozen=True)
class Block:
    """Some queries of some pairs of sample and head: of whole samples, or of heads of one sample.

    Attributes:
        samples: how many.
        heads: which heads.
        pairs: the pairs, counted through all samples.
        begin: first query.
        end: one past the last query, hence past the last key they see.
    """

    samples: int
    heads: slice
    pairs: slice
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its logits: pairs, queries, keys."""
        return self.pairs.stop - self.pairs.start, self.end - self.begin, self.end

    def queries(self, x: Tensor) -> Tensor:
        """The rows of the queries in (pairs, N, …)."""
        return x[self.pairs, self.begin : self.end]

    def keys(self, x: Tensor) -> Tensor:
        """The rows of the keys they see in (pairs, N, …)."""
        return x[self.pairs, : self.end]

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of the Toeplitz rows (H, rows, N) that belongs to these queries and keys."""
        _, rows, tokens = bias.shape
        return bias[self.heads, rows - (self.end - self.begin) :, tokens - self.end :]

    def by_sample(self, x: Tensor) -> Tensor:
        """(pairs, …) → (samples, heads, …)."""
        return x.view(self.samples, -1, *x.shape[1:])


def _plan(q: Tensor) -> tuple[int, list[Block]]:
    """The number of queries in a block, and the blocks: about BLOCK_ELEMENTS logits each."""
    batch, heads, tokens = q.shape[:3]
    rows = max(LEAST_ROWS, min(MOST_ROWS, BLOCK_ELEMENTS // tokens))
    if tokens <= 2 * rows:
        rows = tokens  # no hidden half to skip that would pay for more calls
    pairs = max(1, BLOCK_ELEMENTS // (rows * tokens))
    groups: list[tuple[int, slice, int]] = []  # samples, heads, first pair
    if pairs >= heads:
        step = pairs // heads
        for b in range(0, batch, step):
            groups.append((min(step, batch - b), slice(0, heads), b * heads))
    else:
        for b in range(batch):
            for h in range(0, heads, pairs):
                groups.append((1, slice(h, min(h + pairs, heads)), b * heads + h))
    # From the end, so that all blocks but the first are full.
    ends = range(tokens, 0, -rows)
    blocks = []
    for samples, of_heads, first in groups:
        last = first + samples * (of_heads.stop - of_heads.start)
        for end in reversed(ends):
            blocks.append(Block(samples, of_heads, slice(first, last), max(0, end - rows), end))
    return rows, blocks


def _worth_keeping(tokens: int, d_head: int) -> bool:
    """Whether P of a sequence is no larger than what else a block keeps of it for the backward."""
    return tokens <= KEPT_PER_CHANNEL * d_head


def _elements(blocks: list[Block]) -> list[int]:
    """How many logits each block has."""
    return [math.prod(block.shape) for block in blocks]


class Logits(NamedTuple):
    """What the logits scale · q kᵀ + column_j + b(i − j) of all blocks are made of.

    Attributes:
        q: queries (pairs of sample and head, N, d).
        k: keys.
        column: (pairs, N), −‖k_j‖²/√d of L2 logits; None for dot products.
        bias: the last rows of the Toeplitz matrix b.
        scale: 1/√d, twice that for L2.
    """

    q: Tensor
    k: Tensor
    column: Tensor | None
    bias: Tensor
    scale: float

    def weights(self, block: Block, room: Tensor) -> Tensor:
        """P of one block, (pairs, queries, keys), written into ``room``."""
        p = room.view(block.shape)
        bias, by_head = block.of_bias(self.bias), block.by_sample(p)
        if self.column is None:
            by_head.copy_(bias)
        else:
            column = block.by_sample(block.keys(self.column))
            torch.add(bias, column.unsqueeze(-2), out=by_head)
        p.baddbmm_(block.queries(self.q), block.keys(self.k).mT, alpha=self.scale)
        torch.softmax(p, -1, out=p)
        # Weights that round to nothing, before products with them leave the normal numbers: those
        # cost a hundred times as much, and steep biases make many. Gradients are small themselves,
        # so that the threshold is the square root of the smallest normal number.
        return torch.threshold_(p, math.sqrt(torch.finfo(p.dtype).tiny), 0.0)


def _logits(q: Tensor, k: Tensor, by_lag: Tensor, rows: int, l2: bool) -> Logits:
    bias, scale = toeplitz(by_lag, rows), 1 / math.sqrt(q.shape[-1])
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    if not l2:
        return Logits(q, k, None, bias, scale)
    k = k - k[..., :1, :]
    return Logits(k, k, -scale * torch.linalg.vecdot(k, k), bias, 2 * scale)


@torch.library.custom_op("invformer::blocked_attention", mutates_args=())
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, l2: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """Y and, if asked for and not too large, P; causal, all (B, H, N, ·).

    Blocks of queries meet only the keys they see. Short sequences keep P for the backward pass,
    block after block; longer ones compute it again: memory is linear in N.
    """
    rows, blocks = _plan(q)
    logits = _logits(q, k, by_lag, rows, l2)
    sizes = _elements(blocks)
    keep = keep and _worth_keeping(*q.shape[2:])
    p = q.new_empty(sum(sizes) if keep else 0)
    rooms = p.split(sizes) if keep else _one_room(q, sizes)
    y = torch.empty_like(v)
    of_pairs, values = y.flatten(0, 1), v.flatten(0, 1)
    for block, room in zip(blocks, rooms, strict=True):
        block.queries(of_pairs).copy_(logits.weights(block, room) @ block.keys(values))
    return y, p


@torch.library.custom_op("invformer::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, p: Tensor, l2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and by_lag; for L2 the first is that of the one tensor they are.

    Values enter L2 attention as differences from the first token: P maps ones to ones, so that the
    gradient is the same.
    """
    rows, blocks = _plan(q)
    logits = _logits(q, k, by_lag, rows, l2)
    sizes = _elements(blocks)
    kept = p.numel() > 0
    weight_rooms = p.split(sizes) if kept else _one_room(q, sizes)
    gradient_rooms = _one_room(q, sizes)
    gradients = tuple(torch.zeros_like(t) for t in ((q,) if l2 else (q, k, v)))
    dq, dk, dv = (gradients[0 if l2 else i].flatten(0, 1) for i in range(3))
    outer, values = dy.flatten(0, 1), logits.k if l2 else v.flatten(0, 1)
    received = q.new_zeros(logits.q.shape[:2])
    dbias = torch.zeros_like(logits.bias)
    for block, weight_room, room in zip(blocks, weight_rooms, gradient_rooms, strict=True):
        weights = weight_room.view(block.shape) if kept else logits.weights(block, weight_room)
        g = block.queries(outer)
        ds = torch.bmm(g, block.keys(values).mT, out=room.view(block.shape))
        torch.ops.aten._softmax_backward_data.out(ds, weights, -1, ds.dtype, grad_input=ds)
        # Products into a part of each matrix are one call per matrix: slower than a sum apart.
        block.queries(dq).add_(ds @ block.keys(logits.k), alpha=logits.scale)
        to_values = weights.mT @ g
        if l2:
            to_values.baddbmm_(ds.mT, block.queries(logits.q), alpha=logits.scale)
            block.keys(received).add_(ds.sum(-2))
        else:
            block.keys(dk).add_(ds.mT @ block.queries(logits.q), alpha=logits.scale)
        block.keys(dv).add_(to_values)
        block.of_bias(dbias).add_(sum_of_first(block.by_sample(ds)))
    if l2:
        dq.addcmul_(received.unsqueeze(-1), logits.k, value=-logits.scale)
        return gradients[0], q.new_empty(0), q.new_empty(0), sum_by_lag(dbias)
    return gradients[0], gradients[1], gradients[2], sum_by_lag(dbias)


def _one_room(q: Tensor, sizes: list[int]) -> list[Tensor]:
    """Space for the logits of one block after the other, the same for all."""
    room = q.new_empty(max(sizes, default=0))  # an empty batch has no blocks
    return [room[:size] for size in sizes]


def sum_of_first(t: Tensor) -> Tensor:
    """t.sum(0), as a product: PyTorch's sum of a few large slices is several times slower."""
    if len(t) == 1:
        return t[0]
    return (t.new_ones(1, len(t)) @ t.flatten(1)).view(t.shape[1:])


@blocked_attention.register_fake
def _(q, k, v, by_lag, l2, keep):
    keep = keep and _worth_keeping(*q.shape[2:])
    return torch.empty_like(v), q.new_empty(sum(_elements(_plan(q)[1])) if keep else 0)


@blocked_attention_backward.register_fake
def _(dy, q, k, v, by_lag, p, l2):
    others = (q.new_empty(0), q.new_empty(0)) if l2 else (torch.empty_like(k), torch.empty_like(v))
    return torch.empty_like(q), *others, torch.empty_like(by_lag)


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.l2, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _blocked_backward(ctx, dy, dp):
    dq, dk, dv, dby_lag = blocked_attention_backward(dy, *ctx.saved_tensors, ctx.l2)
    if ctx.l2:
        dk = dv = None
    return dq, dk, dv, dby_lag, None, None


blocked_attention.register_autograd(_blocked_backward, setup_context=_keep_for_backward)
