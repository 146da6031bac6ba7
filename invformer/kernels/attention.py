"""Causal attention with a position bias by one function, and the kernels it can run on.

    Y = softmax(S) V,   S_ij = (q_i·k_j)/√d + b_ij              (dot product)
                        S_ij = −‖q_i − q_j‖²/√d + b_ij          (L2; keys and values are q)

| kernel | memory | bias | device | derivatives |
|---|---|---|---|---|
| ``math`` | O(N²) | any | any | all |
| ``native`` | O(N) | any of the lag, learned or not | CPU, with a C++ compiler | first, reverse |
| ``blocked`` | O(N · block) | any of the lag, learned or not | any, tuned on CPU | first, reverse |
| ``sdpa`` | O(N) | none, or low rank in (i, j) | CPU; any, see ``choose`` | first, reverse |
| ``flex`` | O(N) on a GPU | any of the lag | GPU (never run there); CPU forward | first, reverse |

Scores of ``flex`` are float32, so float64, which is asked for where errors are bounded, is left to
``math`` there. L2 logits are float32 or more in every kernel: their expansion
(2 q_i·q_j − ‖q_j‖²)/√d cancels badly in half precision, and a bias column of it would lose
everything (Dao et al. 2022 describe the recomputation in the backward pass that makes memory
linear).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from invformer.kernels import native
from invformer.kernels.blocked import blocked_attention, blocked_l2_attention
from invformer.kernels.causal_attention import causal_attention
from invformer.kernels.native_attention import native_attention, native_l2_attention
from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.precision import without_autocast

Kernel = Literal["auto", "math", "native", "blocked", "sdpa", "flex"]

# Up to this length a product of N² is cheaper than the bookkeeping of any other kernel.
SHORT = 32
# From this length on PyTorch's kernel pays for carrying a low-rank bias as channels.
LONG = 2048
# From this length on it pays for carrying −‖k_j‖²/√d of L2 logits without a bias as one.
LONG_FOR_ONE_CHANNEL = 1024
# Away from the CPU: beyond this length N² numbers per head are too many to hold.
LONG_ON_ACCELERATOR = 512
# Smallest heads that FlexAttention's GPU kernels take, and the size of their blocks.
LEAST_FLEX_CHANNELS = 16
FLEX_BLOCK = 128

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
    with without_autocast(q.device):
        if kernel == "flex":
            return _flex(q, k, v, None, bias).view(shape)
        q, k, v = _batched(q), _batched(k), _batched(v)
        if kernel == "native":
            y = native_attention(q, k, v, _by_lag(bias, q))[0]
        elif kernel == "blocked":
            # As they lie in memory for its products: what is kept for the backward pass, too.
            q, k, v = (t.contiguous() for t in (q, k, v))
            y = _blocked(blocked_attention, [q, k, v], bias)
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
    kernel = choose(kernel, q, bias, l2=True)
    if kernel == "math":
        return l2_attention(q, bias.dense())
    shape, dtype, scale = q.shape, q.dtype, 1 / math.sqrt(q.shape[-1])
    with without_autocast(q.device):
        if kernel == "native":
            q = _batched(q)
            return native_l2_attention(q, _by_lag(bias, q))[0].view(shape).to(dtype)
        if kernel == "blocked":
            return _blocked(blocked_l2_attention, [_batched(q)], bias).view(shape).to(dtype)
        q = q.reshape(-1, *shape[-3:]) if kernel == "flex" else _batched(q)
        centre = q[..., :1, :].detach()
        # In half precision the difference would be rounded, and lengths be those of other points.
        centre = torch.zeros_like(centre) if q.dtype.itemsize < 4 else centre
        k = q - centre
        lengths = -scale * k.to(torch.promote_types(k.dtype, torch.float32)).square().sum(-1)
        if kernel == "flex":
            y = _flex(2 * k, k, k, lengths, bias)
        else:
            y = _low_rank(2 * scale * k, k, k, lengths, bias.low_rank)
    return (y + centre).view(shape).to(dtype)


def choose(kernel: Kernel, q: Tensor, bias: LogitBias, l2: bool = False) -> Kernel:
    """The kernel that ``auto`` stands for, or the one asked for if it can do what is asked.

    ``auto`` is ``math`` for gradients in float64, for short sequences, for masks that are not
    causal and under torch.func; else, on a CPU for which it can be compiled, ``native``. Without a
    compiler, or with too few pairs of sample and head for the threads, it is ``sdpa`` for dot
    products without a bias, as PyTorch has it on every device, and on a CPU where it was measured
    faster: for L2 without a bias from 1,024 tokens on, and with one of low rank from 2,048; else
    ``blocked``. Away from the CPU sequences are short up to 512 tokens, but for dot products
    without a bias.

    ``flex`` leaves float64 and empty batches to ``math``.

    Raises:
        ValueError: the kernel cannot do this, and why.
    """
    kernel = _override or kernel
    low_rank = bias.is_zero or bias.low_rank is not None
    on_cpu = q.device.type == "cpu"
    as_it_is = bias.is_zero and not l2  # what PyTorch's kernels compute, on any device
    if kernel == "auto":
        precise = q.dtype == torch.float64 and torch.is_grad_enabled()
        short = q.shape[-2] <= (SHORT if on_cpu or as_it_is else LONG_ON_ACCELERATOR)
        plain = precise or short or bias.by_lag is None
        if plain or torch._C._are_functorch_transforms_active():
            return "math"
        if on_cpu and native.occupies_threads(math.prod(q.shape[:-2])) and native.is_available():
            return "native"
        least = LONG_FOR_ONE_CHANNEL if bias.is_zero else LONG
        fused = on_cpu and low_rank and q.shape[-2] >= least
        return "sdpa" if as_it_is or fused else "blocked"
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown attention kernel {kernel!r}: choose one of {get_args(Kernel)}")
    if kernel != "math" and bias.by_lag is None:
        raise ValueError(f"attention kernel {kernel!r} needs a causal mask: choose 'math'")
    if kernel == "sdpa" and not low_rank:
        raise ValueError(
            "attention kernel 'sdpa' takes no bias table: its gradient is not to be had from the "
            "fused kernel; choose 'blocked', or a position bias of low rank"
        )
    if kernel == "sdpa" and not (on_cpu or as_it_is):
        raise ValueError(
            f"attention kernel 'sdpa' is for the CPU, not {q.device.type}, but for dot products "
            "without a bias: choose 'flex' or 'math'"
        )
    if kernel == "native" and not on_cpu:
        raise ValueError(f"attention kernel 'native' is for the CPU, not {q.device.type}")
    if kernel == "native" and not native.is_available():
        raise ValueError(
            f"attention kernel 'native' could not be compiled: {native.complaint()}; choose 'auto'"
        )
    if kernel == "flex" and (q.dtype == torch.float64 or not q.numel()):
        return "math"
    if kernel == "flex" and not on_cpu and q.shape[-1] < LEAST_FLEX_CHANNELS:
        raise ValueError(
            f"attention kernel 'flex' needs heads of at least {LEAST_FLEX_CHANNELS} channels on "
            f"{q.device.type}, not {q.shape[-1]}: choose 'auto'"
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


def _blocked(attention: Callable[..., Any], inputs: list[Tensor], bias: LogitBias) -> Tensor:
    """softmax(S + b(i − j)) v, block by block of queries."""
    by_lag = _by_lag(bias, inputs[0])
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, by_lag))
    return attention(*inputs, by_lag, keep)[0]


def _by_lag(bias: LogitBias, q: Tensor) -> Tensor:
    """b at every lag, for every head of q and in its precision."""
    assert bias.by_lag is not None
    return bias.by_lag.to(q.dtype).expand(q.shape[1], -1).contiguous()


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


def _flex(q: Tensor, k: Tensor, v: Tensor, column: Tensor | None, bias: LogitBias) -> Tensor:
    """FlexAttention: column and bias join the float32 scores, whatever precision q has.

    Its forward pass was run on a CPU; nothing of it was ever run on a GPU.
    """
    assert bias.by_lag is not None
    by_lag = bias.by_lag.float().expand(q.shape[-3], -1)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s.float() + by_lag[h, (i - j).clamp(min=0)]
        return s if column is None else s + column[b, h, j]

    fused, blocks = flex_attention, causal_blocks
    if not torch.compiler.is_compiling():
        fused, blocks = _flex_for(q.device.type), _kept_causal_blocks
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return fused(q, k, v, score_mod=score, block_mask=blocks(q.shape[-2], q.device))


@cache
def _flex_for(device_type: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled where its kernels are."""
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)


def causal_blocks(tokens: int, device: torch.device) -> BlockMask:
    """The causal mask by blocks of queries and keys, from their numbers and not from N² pairs.

    Blocks below the diagonal are seen as a whole, the one on it in part; so are all blocks of a
    last row of blocks that the sequence does not fill.
    """
    count = math.ceil(tokens / FLEX_BLOCK)
    row = torch.arange(count, dtype=torch.int32, device=device)
    column = row.expand(count, count)
    is_filled = row < tokens // FLEX_BLOCK
    num_full = torch.where(is_filled, row, 0)
    num_partial = torch.where(is_filled, 1, row + 1)
    # From the diagonal on: what is seen in part is the first, or, in the last row, all of them.
    partial = torch.where(is_filled[:, None], (column + row[:, None]) % count, column)
    return BlockMask.from_kv_blocks(
        num_partial[None, None], partial[None, None], num_full[None, None],
        column[None, None].contiguous(),
        BLOCK_SIZE=FLEX_BLOCK, mask_mod=_sees, seq_lengths=(tokens, tokens),
    )  # fmt: skip


def _sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i sees key j."""
    return i >= j


@lru_cache(maxsize=8)
def _kept_causal_blocks(tokens: int, device: torch.device) -> BlockMask:
    """The same one for all layers and steps."""
    with torch.inference_mode(False):  # or nothing could be derived with it later
        return causal_blocks(tokens, device)


def _batched(x: Tensor) -> Tensor:
    """(*batch, H, N, d) → (B, H, N, d), in float32 at least."""
    return x.reshape(-1, *x.shape[-3:]).to(torch.promote_types(x.dtype, torch.float32))
