"""PyTorch's fused causal attention on a CPU, with its normalisers and their derivative."""

import torch
from torch import Tensor

from invformer.numerics.precision import denormals_flushed


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
