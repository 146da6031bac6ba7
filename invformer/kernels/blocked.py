"""The ``blocked`` kernel: causal attention with a bias of the lag, a block of queries at a time.

Forward and backward of :func:`.attention_kernel.attend` on a CPU, in memory linear in N beyond the
length up to which the weights are kept (Dao et al. 2022 describe the recomputation).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# Logits held at a time: 2 MiB of float32, the second-level caches of two cores. Elsewhere 64 MiB:
# there a call has to be large (not measured).
BLOCK_ELEMENTS, BLOCK_ELEMENTS_ON_ACCELERATOR = 2**19, 2**24
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

    def of_samples(self, x: Tensor, tokens: slice | None = None) -> Tensor:
        """The same rows in (B, H, N, …): its queries, or those of ``tokens``."""
        first = self.pairs.start // x.shape[1]
        rows = slice(self.begin, self.end) if tokens is None else tokens
        return x[first : first + self.samples, self.heads, rows]

    def by_sample(self, x: Tensor) -> Tensor:
        """(pairs, …) → (samples, heads, …)."""
        return x.view(self.samples, -1, *x.shape[1:])


def _plan(q: Tensor) -> tuple[int, list[Block]]:
    """The number of queries in a block, and the blocks: about BLOCK_ELEMENTS logits each."""
    batch, heads, tokens = q.shape[:3]
    most = BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS_ON_ACCELERATOR
    rows = max(LEAST_ROWS, min(MOST_ROWS, most // tokens))
    if tokens <= 2 * rows:
        rows = tokens  # no hidden half to skip that would pay for more calls
    pairs = max(1, most // (rows * tokens))
    groups: list[tuple[int, slice, int]] = []  # samples, heads, first pair
    if pairs >= heads:
        step = pairs // heads
        for b in range(0, batch, step):
            groups.append((min(step, batch - b), slice(0, heads), b * heads))
    else:
        for b in range(batch):
            for h in range(0, heads, pairs):
                groups.append((1, slice(h, min(h + pairs, heads)), b * heads + h))
    # From the end: all blocks but the last are full, and the first sees all keys.
    ends = range(tokens, 0, -rows)
    blocks = []
    for samples, of_heads, first in groups:
        last = first + samples * (of_heads.stop - of_heads.start)
        for end in ends:
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


def _dot_product(q: Tensor, k: Tensor, bias: Tensor) -> Logits:
    """q_i·k_j/√d + b."""
    return Logits(q.flatten(0, 1), k.flatten(0, 1), None, bias, 1 / math.sqrt(q.shape[-1]))


def _l2(k: Tensor, column: Tensor, bias: Tensor) -> Logits:
    """−‖k_i − k_j‖²/√d + b without ‖k_i‖², which softmax ignores."""
    k = k.flatten(0, 1)
    return Logits(k, k, column.flatten(0, 1), bias, 2 / math.sqrt(k.shape[-1]))


@torch.library.custom_op("invformer::blocked_attention", mutates_args=())
def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ/√d + b) v and, if asked for and not too large, P; causal, all (B, H, N, ·).

    Blocks of queries meet only the keys they see. Short sequences keep P for the backward pass,
    block after block; longer ones compute it again: memory is linear in N.
    """
    rows, blocks = _plan(q)
    logits = _dot_product(q, k, toeplitz(by_lag, rows))
    y, p, values = token_by_token(q), _room_to_keep(q, blocks, keep), v.flatten(0, 1)
    for block, weights in _weights_of_blocks(logits, blocks, p, known=False):
        block.of_samples(y).copy_(block.by_sample(torch.bmm(weights, block.keys(values))))
    return y, p


@torch.library.custom_op("invformer::blocked_l2_attention", mutates_args=())
def blocked_l2_attention(
    q: Tensor, by_lag: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(−‖q_i − q_j‖²/√d + b) q, P like there, and what logits are made of, for the backward.

    That is k, q less its first token, in the place of q, and −‖k_j‖²/√d. Rows of P sum to one:
    values are differences from the first token too.
    """
    rows, blocks = _plan(q)
    first = q[..., :1, :]
    k = torch.sub(q, first, out=q.new_empty(q.shape))
    column = torch.linalg.vecdot(k, k).mul_(-1 / math.sqrt(q.shape[-1]))
    logits = _l2(k, column, toeplitz(by_lag, rows))
    y, p = token_by_token(q), _room_to_keep(q, blocks, keep)
    for block, weights in _weights_of_blocks(logits, blocks, p, known=False):
        mean = block.by_sample(torch.bmm(weights, block.keys(logits.k)))
        torch.add(mean, block.of_samples(first, slice(None)), out=block.of_samples(y))
    return y, p, k, column


@torch.library.custom_op("invformer::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and by_lag."""
    rows, blocks = _plan(q)
    logits = _dot_product(q, k, toeplitz(by_lag, rows))
    dq, dk, dv = (torch.zeros_like(t) for t in (logits.q, logits.k, logits.k))
    dbias = torch.zeros_like(logits.bias)
    for block, weights, g, ds in _gradients_of_blocks(dy, logits, v.flatten(0, 1), blocks, p):
        # Products into a part of each matrix are one call per matrix: slower than a sum apart.
        block.queries(dq).add_(torch.bmm(ds, block.keys(logits.k)), alpha=logits.scale)
        block.keys(dk).add_(torch.bmm(ds.mT, block.queries(logits.q)), alpha=logits.scale)
        block.keys(dv).add_(torch.bmm(weights.mT, g))
        block.of_bias(dbias).add_(sum_of_first(block.by_sample(ds)))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), sum_by_lag(dbias)


@torch.library.custom_op("invformer::blocked_l2_attention_backward", mutates_args=())
def blocked_l2_attention_backward(
    dy: Tensor, by_lag: Tensor, p: Tensor, k: Tensor, column: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of q, which is queries, keys and values, and of by_lag.

    That of the first token, which is subtracted from all, is zero: P maps ones to ones.
    """
    rows, blocks = _plan(k)
    logits = _l2(k, column, toeplitz(by_lag, rows))
    dk = torch.zeros_like(logits.k)
    received = torch.zeros_like(logits.k[..., 0])
    dbias = torch.zeros_like(logits.bias)
    for block, weights, g, ds in _gradients_of_blocks(dy, logits, logits.k, blocks, p):
        block.queries(dk).add_(torch.bmm(ds, block.keys(logits.k)), alpha=logits.scale)
        to_keys = torch.bmm(weights.mT, g)
        to_keys.baddbmm_(ds.mT, block.queries(logits.q), alpha=logits.scale)
        block.keys(dk).add_(to_keys)
        block.keys(received).add_(ds.sum(-2))
        block.of_bias(dbias).add_(sum_of_first(block.by_sample(ds)))
    received = received.view(*column.shape, 1)
    dq = token_by_token(k)
    torch.addcmul(dk.view(k.shape), received, k, value=-logits.scale, out=dq)
    return dq, sum_by_lag(dbias)


def _weights_of_blocks(
    logits: Logits, blocks: list[Block], p: Tensor, known: bool
) -> Iterator[tuple[Block, Tensor]]:
    """Every block and its P: taken from p if known, else computed, in p if there is room."""
    sizes = _elements(blocks)
    kept = p.numel() > 0
    rooms = p.split(sizes) if kept else _one_room(logits.k, sizes)
    for block, room in zip(blocks, rooms, strict=True):
        yield block, room.view(block.shape) if kept and known else logits.weights(block, room)


def _gradients_of_blocks(
    dy: Tensor, logits: Logits, values: Tensor, blocks: list[Block], p: Tensor
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Every block, its P, its rows of dY, and the gradient of its logits."""
    outer = dy.flatten(0, 1)
    rooms = _one_room(logits.k, _elements(blocks))
    weights_of_blocks = _weights_of_blocks(logits, blocks, p, known=True)
    for (block, weights), room in zip(weights_of_blocks, rooms, strict=True):
        g = block.queries(outer)
        ds = torch.bmm(g, block.keys(values).mT, out=room.view(block.shape))
        torch._softmax_backward_data(ds, weights, -1, ds.dtype, grad_input=ds)  # type: ignore
        yield block, weights, g, ds


def token_by_token(x: Tensor) -> Tensor:
    """Room for (B, H, N, d), in memory (B, N, H, d): as the tokens that heads are parts of."""
    batch, heads, tokens, d_head = x.shape
    return x.new_empty(batch, tokens, heads, d_head).transpose(1, 2)


def _room_to_keep(q: Tensor, blocks: list[Block], keep: bool) -> Tensor:
    """Room for P of all blocks, none if it is not to be kept."""
    return q.new_empty(sum(_elements(blocks)) if keep and _worth_keeping(*q.shape[2:]) else 0)


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
def _(q, k, v, by_lag, keep):
    return token_by_token(q), _room_to_keep(q, _plan(q)[1], keep)


@blocked_l2_attention.register_fake
def _(q, by_lag, keep):
    p, column = _room_to_keep(q, _plan(q)[1], keep), q.new_empty(q.shape[:-1])
    return token_by_token(q), p, q.new_empty(q.shape), column


@blocked_attention_backward.register_fake
def _(dy, q, k, v, by_lag, p):
    return (*(t.new_empty(t.shape) for t in (q, k, v)), torch.empty_like(by_lag))


@blocked_l2_attention_backward.register_fake
def _(dy, by_lag, p, k, column):
    return token_by_token(k), torch.empty_like(by_lag)


def _keep_inputs(ctx, inputs, output) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)  # zeros as large as P, which nobody derives by


def _keep_keys(ctx, inputs, output) -> None:
    _, by_lag, _ = inputs
    ctx.save_for_backward(by_lag, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dp):
    if dy is None:
        return (None,) * 5
    return *blocked_attention_backward(dy, *ctx.saved_tensors), None


def _l2_backward(ctx, dy, *others):
    if dy is None:
        return (None,) * 3
    return *blocked_l2_attention_backward(dy, *ctx.saved_tensors), None


blocked_attention.register_autograd(_backward, setup_context=_keep_inputs)
blocked_l2_attention.register_autograd(_l2_backward, setup_context=_keep_keys)
