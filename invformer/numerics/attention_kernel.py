"""Causal attention with a position bias by one function, and the kernels it can run on.

    Y = softmax(S) V,   S_ij = (q_i·k_j)/√d + b_ij              (dot product)
                        S_ij = −‖q_i − q_j‖²/√d + b_ij          (L2; keys and values are q)

| kernel | memory | bias | device | derivatives |
|---|---|---|---|---|
| ``math`` | O(N²) | any | any | all |
| ``blocked`` | O(N · block) | any of the lag, learned or not | any, tuned on CPU | first, reverse |
| ``sdpa`` | O(N) | none, or low rank in (i, j) | CPU | first, reverse |
| ``flex`` | O(N) on a GPU | any of the lag | GPU (never run there); CPU forward | first, reverse |

L2 logits are float32 or more in every kernel: their expansion (2 q_i·q_j − ‖q_j‖²)/√d cancels badly
in half precision, and a bias column of it would lose everything (Dao et al. 2022 describe the
recomputation in the backward pass that makes memory linear).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.precision import denormals_flushed

Kernel = Literal["auto", "math", "blocked", "sdpa", "flex"]

# Logits held at a time by ``blocked``: 2 MiB of float32, the second-level caches of two cores.
BLOCK_ELEMENTS = 2**19
MOST_ROWS, LEAST_ROWS = 64, 32
# P is kept for the backward pass up to a length of so many times the channels of a head: it is then
# no larger than the rest of what a residual block keeps, about 14 numbers per token and channel.
KEPT_PER_CHANNEL = 8
# Up to this length a product of N² is cheaper than the bookkeeping of any other kernel.
SHORT = 32
# From this length on skipping hidden blocks pays for carrying a low-rank bias as channels.
LONG = 512

_override: Kernel | None = None


class LowRank(NamedTuple):
    """b_ij = Σ_r left_ir right_jr for every i > j, and b_ii = 0.

    Attributes:
        left: per query (H, N, R).
        right: per key (H, N, R).
    """

    left: Float[Tensor, "heads tokens rank"]
    right: Float[Tensor, "heads tokens rank"]


@dataclass(frozen=True)
class LogitBias:
    """What is added to the logits, in the forms that kernels understand; H may be one.

    Attributes:
        dense: makes the (H, N, N) tensor, −∞ where j is hidden from i.
        by_lag: (H, N), b at the lags 0 … N − 1 of a causal bias of the lag; None for other masks.
        low_rank: the same as a product, where it is one.
        is_zero: causal mask alone.
    """

    dense: Callable[[], Tensor]
    by_lag: Float[Tensor, "heads tokens"] | None = None
    low_rank: LowRank | None = None
    is_zero: bool = False


def attend(
    q: Float[Tensor, "*batch heads tokens d_head"],
    k: Float[Tensor, "*batch heads tokens d_head"],
    v: Float[Tensor, "*batch heads tokens d_head"],
    bias: LogitBias,
    kernel: Kernel = "auto",
) -> Float[Tensor, "*batch heads tokens d_head"]:
    """Dot-product attention softmax(q kᵀ/√d + b) v.

    Raises:
        ValueError: the kernel cannot do this (see the table above), and why.
    """
    kernel = choose(kernel, q, bias)
    if kernel == "math":
        logits = (q / math.sqrt(q.shape[-1])) @ k.mT + bias.dense().to(q.dtype)
        return logits.softmax(-1) @ v
    if kernel == "sdpa" and bias.is_zero:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    shape, dtype, scale = q.shape, q.dtype, 1 / math.sqrt(q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        if kernel == "flex":
            return _flex(q, k, v, None, bias).view(shape)
        q, k, v = _batched(q), _batched(k), _batched(v)
        if kernel == "blocked":
            y = _blocked(q, k, v, bias, l2=False)
        else:
            y = _low_rank(scale * q, k, v, None, bias.low_rank)
    return y.view(shape).to(dtype)


def attend_l2(
    q: Float[Tensor, "*batch heads tokens d_head"], bias: LogitBias, kernel: Kernel = "auto"
) -> Float[Tensor, "*batch heads tokens d_head"]:
    """Tied L2 attention softmax(−‖q_i − q_j‖²/√d + b) q.

    Keys are centred at the first token, as in :mod:`.l2_attention`. The centre is treated as a
    constant: rows of P sum to one, so its contributions to the gradient cancel.

    Raises:
        ValueError: the kernel cannot do this (see the table above), and why.
    """
    kernel = choose(kernel, q, bias)
    if kernel == "math":
        return l2_attention(q, bias.dense())
    shape, dtype, scale = q.shape, q.dtype, 1 / math.sqrt(q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        if kernel == "blocked":
            q = _batched(q)
            return _blocked(q, q, q, bias, l2=True).view(shape).to(dtype)
        q = q.reshape(-1, *shape[-3:]) if kernel == "flex" else _batched(q)
        centre = q[..., :1, :].detach()
        k = q - centre
        lengths = -scale * k.to(torch.promote_types(k.dtype, torch.float32)).square().sum(-1)
        if kernel == "flex":
            y = _flex(2 * k, k, k, lengths, bias)
        else:
            y = _low_rank(2 * scale * k, k, k, lengths, bias.low_rank)
    return (y + centre).view(shape).to(dtype)


def choose(kernel: Kernel, q: Tensor, bias: LogitBias) -> Kernel:
    """The kernel that ``auto`` stands for, or the one asked for if it can do what is asked.

    ``auto`` is ``math`` for gradients in float64, for short sequences, for masks that are not
    causal, away from the CPU and under torch.func; else ``sdpa`` without a bias and for a long
    sequence with one of low rank; else ``blocked``.

    Raises:
        ValueError: the kernel cannot do this, and why.
    """
    kernel = _override or kernel
    low_rank = bias.is_zero or bias.low_rank is not None
    on_cpu = q.device.type == "cpu"
    if kernel == "auto":
        precise = q.dtype == torch.float64 and torch.is_grad_enabled()
        plain = precise or q.shape[-2] <= SHORT or bias.by_lag is None
        if plain or not on_cpu or torch._C._are_functorch_transforms_active():
            return "math"
        return "sdpa" if bias.is_zero or (low_rank and q.shape[-2] >= LONG) else "blocked"
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown attention kernel {kernel!r}: choose one of {get_args(Kernel)}")
    if kernel != "math" and bias.by_lag is None:
        raise ValueError(f"attention kernel {kernel!r} needs a causal mask: choose 'math'")
    if kernel == "sdpa" and not low_rank:
        raise ValueError(
            "attention kernel 'sdpa' takes no bias table: its gradient is not to be had from the "
            "fused kernel; choose 'blocked', or a position bias of low rank"
        )
    if kernel == "sdpa" and not on_cpu:
        raise ValueError(
            f"attention kernel 'sdpa' is for the CPU, not {q.device.type}: choose 'flex' or 'math'"
        )
    if kernel == "flex" and on_cpu and torch.is_grad_enabled() and q.requires_grad:
        raise ValueError(
            "attention kernel 'flex' has no backward pass on the CPU: choose 'blocked' or 'auto'"
        )
    return kernel


@contextmanager
def only(kernel: Kernel) -> Iterator[None]:
    """Run every attention on this kernel, whatever it was built with: ``math`` for derivatives."""
    global _override
    before, _override = _override, kernel
    try:
        yield
    finally:
        _override = before


def toeplitz(
    by_lag: Float[Tensor, "heads tokens"], rows: int
) -> Float[Tensor, "heads rows tokens"]:
    """The last ``rows`` rows of the matrix b(i − j), −∞ above the diagonal."""
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


# --- blocked ------------------------------------------------------------------------------------


def _blocked(q: Tensor, k: Tensor, v: Tensor, bias: LogitBias, l2: bool) -> Tensor:
    """softmax(S + b(i − j)) v, block by block of queries; L2 takes q alone."""
    assert bias.by_lag is not None
    by_lag = bias.by_lag.to(q.dtype).expand(q.shape[1], -1)
    tensors = [t.contiguous() for t in (q, k, v, by_lag)]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return blocked_attention(*tensors, l2, keep)[0]


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
    room = q.new_empty(max(sizes))
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


# --- sdpa ---------------------------------------------------------------------------------------


def _low_rank(
    q: Tensor, k: Tensor, v: Tensor, column: Tensor | None, low_rank: LowRank | None
) -> Tensor:
    """softmax(q kᵀ + column_j + b_ij) v with column and bias as extra channels of q and k.

    The fused kernel is then asked for a causal mask alone and skips the hidden half. b_ii = 0 is
    not on the low-rank surface, so the strict past is attended to first, P = past and self joined
    by their normalisers.
    """
    if low_rank is None:
        assert column is not None
        q, k = (
            torch.cat([torch.ones_like(q[..., :1]), q], -1),
            torch.cat([column[..., None], k], -1),
        )
        v = F.pad(v, (0, 1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[..., :-1]
    if q.shape[-2] == 1:
        return v
    if column is None:
        column = k.new_zeros(k.shape[:-1])
    self_logit = (q * k).sum(-1, keepdim=True) + column[..., None]
    left, right = (x.to(q.dtype).expand(len(q), *x.shape) for x in low_rank)
    # The bias comes first: its large parts cancel exactly before anything small is added.
    queries = torch.cat([left, q, torch.ones_like(column[..., None])], -1)[..., 1:, :]
    keys = torch.cat([right, k, column[..., None]], -1)[..., :-1, :]
    values = F.pad(v[..., :-1, :], (0, queries.shape[-1] - v.shape[-1]))
    past, log_mass = causal_attention(queries, keys, values)
    share = torch.sigmoid(log_mass[..., None] - self_logit[..., 1:, :])
    rest = torch.lerp(v[..., 1:, :], past[..., : v.shape[-1]], share)
    return torch.cat([v[..., :1, :], rest], -2)


@torch.library.custom_op("invformer::causal_attention", mutates_args=())
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's fused causal attention at scale 1, and log Σ_j exp S_ij of every query.

    All (B, H, N, d) with one d. The last channel of v is zero: the gradient of the normalisers
    takes its place in the backward pass.
    """
    with denormals_flushed():
        y, log_mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=1.0
        )
    return y, log_mass.contiguous()


@torch.library.custom_op("invformer::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    dy: Tensor, dlog_mass: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dS = P∘(dy vᵀ − rowsum(dy∘y) + dlog_mass).

    With one in the last channel of v and dlog_mass in that of dy, dy vᵀ grows by dlog_mass; y is
    zero there, so the row sum does not.
    """
    dy, v = dy.clone(), v.clone()
    dy[..., -1], v[..., -1] = dlog_mass, 1.0
    with denormals_flushed():
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, log_mass, 0.0, True, scale=1.0
        )
    return tuple(g.contiguous() for g in gradients)


@causal_attention.register_fake
def _(q, k, v):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1])


@causal_attention_backward.register_fake
def _(dy, dlog_mass, q, k, v, y, log_mass):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_all(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)


def _causal_backward(ctx, dy, dlog_mass):
    return causal_attention_backward(dy, dlog_mass, *ctx.saved_tensors)


causal_attention.register_autograd(_causal_backward, setup_context=_keep_all)


# --- flex ---------------------------------------------------------------------------------------


def _flex(q: Tensor, k: Tensor, v: Tensor, column: Tensor | None, bias: LogitBias) -> Tensor:
    """FlexAttention: column and bias join the float32 scores, whatever precision q has.

    Its forward pass was run on a CPU; nothing of it was ever run on a GPU.
    """
    assert bias.by_lag is not None
    by_lag = bias.by_lag.float().expand(q.shape[-3], -1)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s.float() + by_lag[h, (i - j).clamp(min=0)]
        return s if column is None else s + column[b, h, j]

    tokens, device = q.shape[-2], q.device
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device.type)
    fused = flex_attention if device.type == "cpu" else torch.compile(flex_attention)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return fused(q, k, v, score_mod=score, block_mask=causal)


def _batched(x: Tensor) -> Tensor:
    """(*batch, H, N, d) → (B, H, N, d), in float32 at least."""
    return x.reshape(-1, *x.shape[-3:]).to(torch.promote_types(x.dtype, torch.float32))
