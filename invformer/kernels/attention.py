"""Causal attention with a position bias by one function, and the kernels it can run on.

    Y = softmax(S) V,   S_ij = (q_i·k_j)/√d + b_ij              (dot product)
                        S_ij = −‖q_i − q_j‖²/√d + b_ij          (L2; keys and values are q)

| kernel | memory | computes | device | derivatives |
|---|---|---|---|---|
| ``math`` | O(N²) | everything | any | all |
| ``native`` | O(N) | causal, any bias of the lag | CPU, with a C++ compiler | first, reverse |
| ``sdpa`` | O(N), with a bias O(N²) once for all samples | causal | any | first, reverse |
| ``triton`` | O(N) | causal, any bias of the lag | NVIDIA GPU, with Triton | first, reverse |

L2 logits are computed in float32 or more, because their expansion (2 q_i·q_j − ‖q_j‖²)/√d cancels
badly in half precision. −‖q_j‖² is one more channel of the keys, multiplied by a one in the
queries; three bfloat16 channels for it spoil gradients (docs/experiments.md). ``triton`` multiplies
numbers of the precision given, and has their sums and ‖q_j‖² in float32.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.kernels import native, triton_attention
from invformer.kernels.native_attention import (
    has_tangents,
    native_attention,
    native_ball_attention,
)
from invformer.numerics.ball import into_ball
from invformer.numerics.l2_attention import PerHead, l2_attention, with_lengths
from invformer.numerics.precision import at_least_single, without_autocast
from invformer.numerics.private import is_transformed
from invformer.numerics.token_shift import delay

Kernel = Literal["auto", "math", "native", "sdpa", "triton"]

# Up to this length a product of N² is cheaper than the bookkeeping of any other kernel.
SHORT = 32
# Fused kernels read rows of a multiple of 16 bytes.
ROW_OF_FLOATS = 4

_override: Kernel | None = None


@dataclass(frozen=True)
class LogitBias:
    """The numbers b that are added to the logits, in the forms that kernels take; H may be one.

    Attributes:
        dense: makes the (H, N, N) tensor, −∞ where j is hidden from i.
        by_lag: (H, N), b at the lags 0 … N − 1 of a causal bias of the lag; None for other masks.
        is_zero: causal mask alone.
    """

    dense: Callable[[], Tensor]
    by_lag: Float[Tensor, "heads tokens"] | None = None
    is_zero: bool = False


def attend(q: PerHead, k: PerHead, v: PerHead, bias: LogitBias, kernel: Kernel = "auto") -> PerHead:
    """Dot-product attention softmax(q kᵀ/√d + b) v; ValueError if the kernel cannot do it."""
    require_alike(q, k, v)
    kernel = choose(kernel, q, bias, False, k, v)
    if kernel == "math":
        logits = (q / math.sqrt(q.shape[-1])) @ k.mT + bias.dense().to(q.dtype)
        return logits.softmax(-1) @ v
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, **_mask(bias, q.dtype))
    return _fused(q, k, v, bias, kernel)


def attend_in_ball(
    z: Float[Tensor, "*batch tokens three_heads_d"],
    temperature: Float[Tensor, "heads"],
    bias: LogitBias,
    strictly_causal: bool,
    kernel: Kernel = "auto",
) -> PerHead:
    """softmax(τ q kᵀ + b) v for [q, k, v] = ψ(z) of every head; ValueError as in :func:`attend`.

    Strictly causal, keys and values are those of the token before, and zero for the first token.
    """
    heads = len(temperature)
    rows = z.unflatten(-1, (3, heads, -1))
    q_in = rows.select(-3, 0).transpose(-3, -2)  # (*batch, H, N, d)
    kernel = choose(kernel, q_in, bias, False, temperature)
    if kernel == "native" and z.dtype.itemsize >= 4:
        z = z.reshape(-1, *z.shape[-2:]).contiguous()
        tau, by_lag = temperature.to(z.dtype).contiguous(), _by_lag(bias, q_in)
        return native_ball_attention(z, tau, by_lag, strictly_causal)[0].view(q_in.shape)
    q, k, v = (part.transpose(-3, -2) for part in into_ball(rows, 1.0).unbind(-3))
    if strictly_causal:
        k, v = delay(k), delay(v)
    # Kernels divide logits by √d, so that they are τ q·k + b.
    scale = (temperature * math.sqrt(q.shape[-1]))[:, None, None].to(q)
    return attend(q * scale, k, v, bias, kernel)


def attend_l2(q: PerHead, bias: LogitBias, kernel: Kernel = "auto") -> PerHead:
    """Tied L2 attention softmax(−‖q_i − q_j‖²/√d + b) q; ValueError as in :func:`attend`.

    Keys are taken relative to the first token. This origin is treated as a constant: rows of P sum
    to one, so its contributions to the gradient cancel.
    """
    kernel = choose(kernel, q, bias, l2=True)
    if kernel == "math":
        return l2_attention(q, bias.dense())
    if kernel in ("native", "triton"):
        return _fused(q, None, None, bias, kernel)
    shape, dtype = q.shape, q.dtype
    with without_autocast(q.device):
        q = _batched(q)
        origin = q[..., :1, :].detach()
        k = q - origin
        # [2 k_i/√d, 1]·[k_j, −‖k_j‖²/√d] is the logit, except for a term that is constant in j.
        queries = F.pad(k * (2 / math.sqrt(k.shape[-1])), (0, 1), value=1.0)
        keys = with_lengths(k)
        padding = (0, -keys.shape[-1] % ROW_OF_FLOATS)
        queries, keys = F.pad(queries, padding), F.pad(keys, padding)
        # Values as wide as keys, as the fastest kernels want them.
        mask = _mask(bias, keys.dtype)
        y = F.scaled_dot_product_attention(queries, keys, keys, scale=1, **mask)
    return (y[..., : k.shape[-1]] + origin).view(shape).to(dtype)


def _fused(
    q: Tensor, k: Tensor | None, v: Tensor | None, bias: LogitBias, kernel: Kernel
) -> PerHead:
    """Attention by ``triton``, in the format given, or ``native``; L2 without keys and values."""
    given = q, k, v
    if kernel == "triton":
        parts = [None if t is None else t.reshape(-1, *t.shape[-3:]) for t in given]
        by_lag = None if bias.is_zero else _by_lag(bias, q)
        return triton_attention.triton_attention(*parts, by_lag)[0].view(q.shape)
    with without_autocast(q.device):
        parts = [None if t is None else _batched(t) for t in given]
        return native_attention(*parts, _by_lag(bias, q))[0].view(q.shape).to(q.dtype)


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless queries, keys and values have one shape and format on one device."""
    kinds = [(tuple(t.shape), t.dtype, t.device) for t in (q, k, v)]
    if len(set(kinds)) > 1:
        each = ", ".join(f"{shape} in {dtype} on {device}" for shape, dtype, device in kinds)
        raise ValueError(f"queries, keys and values have one shape and format, got {each}")


def choose(kernel: Kernel, q: Tensor, bias: LogitBias, l2: bool = False, *others: Tensor) -> Kernel:
    """The kernel that ``auto`` stands for, or the one asked for; ValueError if it cannot.

    It is ``math`` in forward mode and under ``torch.func``, which the others do not know.
    """
    kernel = _override or kernel
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown attention kernel {kernel!r}: choose one of {get_args(Kernel)}")
    if not q.is_floating_point():
        raise ValueError(f"attention is for floating-point numbers, not {q.dtype}")
    by_lag = () if bias.by_lag is None else (bias.by_lag,)
    if is_transformed() or has_tangents(q, *others, *by_lag):
        return "math"
    on_cpu = q.device.type == "cpu"
    if kernel == "auto":
        # Accelerators have no fused kernel for float64.
        precise = q.dtype == torch.float64 and (torch.is_grad_enabled() or not on_cpu)
        plain = precise or q.shape[-2] <= SHORT or bias.by_lag is None or not q.numel()
        if plain or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return "math"
        if on_cpu and native.occupies_threads(math.prod(q.shape[:-2])) and native.is_available():
            return "native"
        if (l2 or not bias.is_zero) and triton_attention.can_take(q):
            return "triton"
        return "sdpa" if bias.is_zero or not on_cpu else "math"
    why = None
    if kernel != "math" and bias.by_lag is None:
        why = "needs a causal mask: choose 'math'"
    elif kernel == "native" and not on_cpu:
        why = f"is for the CPU, not {q.device.type}: choose 'auto'"
    elif kernel == "native" and not native.is_available():
        why = f"could not be compiled: {native.complaint()}; choose 'auto'"
    elif kernel == "triton" and not triton_attention.is_available(q.device):
        why = f"cannot run here: {triton_attention.complaint(q.device)}; choose 'auto'"
    elif kernel == "triton" and q.dtype == torch.float64:
        return "math"  # inverses of a model are computed in float64
    elif kernel == "triton" and not triton_attention.can_take(q):
        why = f"takes at most {triton_attention.MOST_CHANNELS} channels a head: choose 'auto'"
    elif kernel in ("native", "sdpa", "triton") and not q.numel():
        return "math"  # PyTorch's own give no gradient to the bias of nothing
    if why:
        raise ValueError(f"attention kernel {kernel!r} {why}")
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


def _by_lag(bias: LogitBias, q: Tensor) -> Tensor:
    """b at every lag, for every head of q and in its precision, in float32 at least."""
    assert bias.by_lag is not None
    if bias.by_lag.shape[-1] != q.shape[-2]:
        raise ValueError(f"{bias.by_lag.shape[-1]} lags of a bias for {q.shape[-2]} tokens")
    dtype = torch.promote_types(q.dtype, torch.float32)
    return bias.by_lag.to(dtype).expand(q.shape[-3], -1).contiguous()


def _batched(x: Tensor) -> Tensor:
    """(*batch, H, N, d) → (B, H, N, d), in float32 at least."""
    return at_least_single(x.reshape(-1, *x.shape[-3:]))


def _mask(bias: LogitBias, dtype: torch.dtype) -> dict[str, Any]:
    """The bias as PyTorch's attention takes it."""
    return {"is_causal": True} if bias.is_zero else {"attn_mask": bias.dense().to(dtype)}
