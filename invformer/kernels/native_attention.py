"""The ``native`` kernel: causal attention with a bias of the lag, compiled for this processor.

Forward and backward of :func:`.attention_kernel.attend` on a CPU in memory linear in N, by
``cpp/attention.cpp``, which says how. Results depend neither on the number of threads nor on the
batch.
"""

import ctypes

import torch
from torch import Tensor

from invformer.kernels import native
from invformer.kernels.blocked import token_by_token
from invformer.kernels.native import pointer


class _Heads(ctypes.Structure):
    """A tensor (B, H, N, d) whose channels lie together, by its strides."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sample", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


# Gradients that are part of another.
NOTHING = _Heads()


@torch.library.custom_op("invformer::native_attention", mutates_args=())
def native_attention(q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ/√d + b) v, and log Σ_j exp S_ij of every query; causal, all (B, H, N, d)."""
    y, log_mass = token_by_token(q), q.new_empty(q.shape[:-1])
    q, k, v = (_with_channels_together(t) for t in (q, k, v))
    of = (_heads(t) for t in (q, k, v))
    _call("forward", q, *of, pointer(by_lag), _heads(y), pointer(log_mass), l2=False)
    return y, log_mass


@torch.library.custom_op("invformer::native_l2_attention", mutates_args=())
def native_l2_attention(q: Tensor, by_lag: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(−‖q_i − q_j‖²/√d + b) q, and log Σ_j exp S_ij less −‖q_i − q_0‖²/√d.

    Keys and values are differences from the first token.
    """
    y, log_mass = token_by_token(q), q.new_empty(q.shape[:-1])
    q = _with_channels_together(q)
    of = [_heads(q)] * 3
    _call("forward", q, *of, pointer(by_lag), _heads(y), pointer(log_mass), l2=True)
    return y, log_mass


@torch.library.custom_op("invformer::native_attention_backward", mutates_args=())
def native_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, log_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and by_lag."""
    dq, dk, dv = (token_by_token(q) for _ in range(3))
    dbias = torch.empty_like(log_mass)
    dy, q, k, v = (_with_channels_together(t) for t in (dy, q, k, v))
    of, to = (_heads(t) for t in (dy, q, k, v)), (_heads(t) for t in (dq, dk, dv))
    made_of = (pointer(by_lag), pointer(log_mass))
    _call("backward", q, *of, *made_of, *to, pointer(dbias), l2=False)
    return dq, dk, dv, dbias.sum(0)


@torch.library.custom_op("invformer::native_l2_attention_backward", mutates_args=())
def native_l2_attention_backward(
    dy: Tensor, q: Tensor, by_lag: Tensor, log_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of q, which is queries, keys and values, and of by_lag."""
    dq, dbias = token_by_token(q), torch.empty_like(log_mass)
    dy, q = _with_channels_together(dy), _with_channels_together(q)
    of, to = (_heads(dy), *[_heads(q)] * 3), (_heads(dq), NOTHING, NOTHING)
    made_of = (pointer(by_lag), pointer(log_mass))
    _call("backward", q, *of, *made_of, *to, pointer(dbias), l2=True)
    return dq, dbias.sum(0)


def _call(direction: str, q: Tensor, *arguments: _Heads | ctypes.c_void_p, l2: bool) -> None:
    """The compiled function for the precision of q."""
    sizes = [ctypes.c_int64(n) for n in q.shape]
    threads = native.threads_for(len(q) * q.shape[1])
    native.call(f"attention_{direction}", q.dtype, *arguments, *sizes, ctypes.c_bool(l2), threads)


def _heads(t: Tensor) -> _Heads:
    return _Heads(t.data_ptr(), *t.stride()[:3])


def _with_channels_together(t: Tensor) -> Tensor:
    """The same; gradients of sums and of broadcasts may lie otherwise."""
    return t if t.stride(-1) == 1 else t.contiguous()


@native_attention.register_fake
def _(q, k, v, by_lag):
    return token_by_token(q), q.new_empty(q.shape[:-1])


@native_l2_attention.register_fake
def _(q, by_lag):
    return token_by_token(q), q.new_empty(q.shape[:-1])


@native_attention_backward.register_fake
def _(dy, q, k, v, by_lag, log_mass):
    return (*(token_by_token(q) for _ in range(3)), torch.empty_like(by_lag))


@native_l2_attention_backward.register_fake
def _(dy, q, by_lag, log_mass):
    return token_by_token(q), torch.empty_like(by_lag)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dlog_mass):
    return (None,) * 4 if dy is None else native_attention_backward(dy, *ctx.saved_tensors)


def _l2_backward(ctx, dy, dlog_mass):
    return (None,) * 2 if dy is None else native_l2_attention_backward(dy, *ctx.saved_tensors)


native_attention.register_autograd(_backward, setup_context=_keep)
native_l2_attention.register_autograd(_l2_backward, setup_context=_keep)
