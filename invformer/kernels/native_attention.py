"""The ``native`` kernel: causal attention with a bias of the lag, compiled for this processor.

Forward and backward of :func:`.attention.attend` on a CPU in memory linear in N, by
``cpp/attention.cpp``, which says how. Results depend neither on the number of threads nor on the
batch. Without keys and values attention is tied L2: both are differences of q from its first token.
With a temperature queries, keys and values are mapped into the unit ball first.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from invformer.kernels import native
from invformer.kernels.native import pointer


class _Heads(ctypes.Structure):
    """A tensor (B, H, N, d) whose channels lie together, by its strides."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((stride, ctypes.c_int64) for stride in ("sample", "head", "token")),
    ]


# Passed for the gradients of keys and values if the gradient of q includes them.
NOTHING = _Heads()


@torch.library.custom_op("invformer::native_attention", mutates_args=())
def native_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, by_lag: Tensor
) -> tuple[Tensor, Tensor]:
    """softmax(S) v and log Σ_j exp S_ij of every query; causal, all (B, H, N, d).

    Of L2 logits −‖q_i − q_0‖²/√d is left out in the second.
    """
    y, log_mass = results(q)
    to = _heads(y), _pointer(log_mass, q)
    _call("forward", q, *map(_heads, _seen(q, k, v)), *_of_heads(by_lag, q), *to, l2=k is None)
    return y, log_mass


@torch.library.custom_op("invformer::native_attention_backward", mutates_args=())
def native_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, by_lag: Tensor, log_mass: Tensor
) -> list[Tensor]:
    """Gradients of by_lag and q, and of k and v if there are any."""
    l2 = k is None
    gradients = [token_by_token(q) for _ in range(1 if l2 else 3)]
    dbias = torch.empty_like(log_mass)
    given = map(_heads, [_alike(dy, q), *_seen(q, k, v)])
    to = [*map(_heads, gradients), *[NOTHING] * (3 - len(gradients))]
    made_of = *_of_heads(by_lag, q), _pointer(log_mass, q)
    _call("backward", q, *given, *made_of, *to, _pointer(dbias, q), None, l2=l2)
    return [dbias.sum(0), *gradients]


@torch.library.custom_op("invformer::native_ball_attention", mutates_args=())
def native_ball_attention(
    z: Tensor, temperature: Tensor, by_lag: Tensor, strictly_causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(τ q·k + b) v, (B, H, N, d), and log Σ_j exp S_ij, for [q, k, v] = ψ(z) of every head.

    z is (B, N, 3 H d) without gaps, τ (H,) and b (H, N). Strictly causal, keys and values are those
    of the token before, zero for the first token.
    """
    q, k, v = _parts_of(z, temperature)
    y, log_mass = results(q)
    made_of = _of_heads(by_lag, q, temperature, strictly_causal)
    _call("forward", q, *map(_heads, (q, k, v)), *made_of, _heads(y), _pointer(log_mass, q))
    return y, log_mass


@torch.library.custom_op("invformer::native_ball_attention_backward", mutates_args=())
def native_ball_attention_backward(
    dy: Tensor,
    z: Tensor,
    temperature: Tensor,
    by_lag: Tensor,
    log_mass: Tensor,
    strictly_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, τ and b."""
    q, k, v = _parts_of(z, temperature)
    dz, dbias = torch.empty_like(z), torch.empty_like(log_mass)
    dtemperature = z.new_empty(q.shape[:2])
    given = map(_heads, (_alike(dy, q), q, k, v))
    made_of = *_of_heads(by_lag, q, temperature, strictly_causal), _pointer(log_mass, q)
    of_heads = _pointer(dbias, q), pointer(dtemperature, *q.shape[:2], dtype=q.dtype)
    _call("backward", q, *given, *made_of, *map(_heads, _parts(dz, q.shape[1])), *of_heads)
    return dz, dtemperature.sum(0), dbias.sum(0)


def _parts_of(z: Tensor, temperature: Tensor) -> list[Tensor]:
    """Queries, keys and values of as many heads as there are temperatures."""
    if z.ndim != 3 or temperature.ndim != 1 or z.shape[-1] % (3 * max(1, len(temperature))):
        raise ValueError(f"compiled code expects (B, N, 3 H d), got {tuple(z.shape)}")
    pointer(z, *z.shape, dtype=z.dtype)
    return _parts(z, len(temperature))


def _parts(z: Tensor, heads: int) -> list[Tensor]:
    """(B, N, 3 H d) as three times (B, H, N, d), in the same memory."""
    return [part.transpose(1, 2) for part in z.unflatten(-1, (3, heads, -1)).unbind(2)]


def _call(direction: str, q: Tensor, *arguments: Any, l2: bool = False) -> None:
    """The compiled function for the precision of q."""
    if not q.numel():
        return
    sizes = [ctypes.c_int64(n) for n in q.shape]
    threads = native.threads_for(len(q) * q.shape[1])
    native.call(f"attention_{direction}", q.dtype, *arguments, *sizes, ctypes.c_bool(l2), threads)


def _seen(q: Tensor, k: Tensor | None, v: Tensor | None) -> list[Tensor]:
    """Queries, keys and values as the compiled code takes them."""
    if q.ndim != 4 or not q.shape[-1] or (k is None) != (v is None):
        raise ValueError(f"compiled code expects (B, H, N, d), got {tuple(q.shape)}")
    return [_alike(q if t is None else t, q) for t in (q, k, v)]


def _alike(t: Tensor, q: Tensor) -> Tensor:
    """A tensor of the shape and format of q, with its channels together."""
    native.require(t, q.shape, q.dtype)
    return with_channels_together(t)


def _pointer(t: Tensor, q: Tensor) -> ctypes.c_void_p:
    """To a number for each query."""
    return pointer(t, *q.shape[:-1], dtype=q.dtype)


def _of_heads(
    by_lag: Tensor, q: Tensor, temperature: Tensor | None = None, strictly_causal: bool = False
) -> tuple[Any, ...]:
    """Biases of every head, its temperature, and whether tokens see only those before them."""
    biases, tau = pointer(by_lag, *q.shape[1:3], dtype=q.dtype), None
    if temperature is not None:
        tau = pointer(temperature, q.shape[1], dtype=q.dtype)
    return biases, tau, ctypes.c_bool(strictly_causal)


def _heads(t: Tensor) -> _Heads:
    heads = _Heads(t.data_ptr(), *t.stride()[:3])
    heads.tensor = t  # a copy made for the call has to outlive it
    return heads


def with_channels_together(t: Tensor) -> Tensor:
    """The tensor, or a copy: channels of gradients of sums and broadcasts may lie apart."""
    return t if t.stride(-1) == 1 else t.contiguous()


def results(q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Room for Y, and for log Σ_j exp S_ij in a format of its own."""
    return token_by_token(q), q.new_empty(q.shape[:-1], dtype=dtype)


def token_by_token(x: Tensor) -> Tensor:
    """Room for (B, H, N, d), in memory (B, N, H, d): as the tokens that heads are parts of."""
    batch, heads, tokens, d_head = x.shape
    return x.new_empty(batch, tokens, heads, d_head).transpose(1, 2)


@native_attention.register_fake
def _(q, k, v, by_lag):
    return results(q)


@native_attention_backward.register_fake
def _(dy, q, k, v, by_lag, log_mass):
    return [torch.empty_like(by_lag), *(token_by_token(q) for t in (q, k, v) if t is not None)]


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise NotImplementedError where a forward-mode derivative would be lost."""
    if has_tangents(*tensors):
        raise NotImplementedError("fused attention has no second derivative: choose kernel 'math'")


def has_tangents(*tensors: Tensor) -> bool:
    """True if one of them carries a forward-mode derivative."""
    return not torch.compiler.is_compiling() and any(
        unpack_dual(t).tangent is not None for t in tensors
    )


def _backward(ctx, dy, dlog_mass):
    refuse_tangents(dy)
    dbias, *gradients = native_attention_backward(dy, *ctx.saved_tensors)
    return *gradients, *[None] * (3 - len(gradients)), dbias


native_attention.register_autograd(_backward, setup_context=_keep)


@native_ball_attention.register_fake
def _(z, temperature, by_lag, strictly_causal):
    return results(_parts(z, len(temperature))[0])


@native_ball_attention_backward.register_fake
def _(dy, z, temperature, by_lag, log_mass, strictly_causal):
    return torch.empty_like(z), torch.empty_like(temperature), torch.empty_like(by_lag)


def _keep_ball(ctx, inputs, output) -> None:
    *tensors, ctx.strictly_causal = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward_ball(ctx, dy, dlog_mass):
    refuse_tangents(dy)
    return *native_ball_attention_backward(dy, *ctx.saved_tensors, ctx.strictly_causal), None


native_ball_attention.register_autograd(_backward_ball, setup_context=_keep_ball)
