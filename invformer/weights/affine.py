"""Affine maps of tokens, in few passes over them."""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.norms import Tokens
from invformer.numerics.precision import has_autocast, without_autocast


def affine(
    x: Float[Tensor, "*batch tokens inputs"],
    w: Float[Tensor, "inputs outputs"],
    b: Float[Tensor, "outputs"] | None = None,
    centre: Float[Tensor, "inputs"] | None = None,
) -> Float[Tensor, "*batch tokens outputs"]:
    """(x + m) W + b in one pass over the tokens."""
    if centre is not None:
        with without_autocast(w.device):
            b = w.mT @ centre if b is None else torch.addmv(b, w.mT, centre)
    return x @ w if b is None else torch.addmm(b, x.flatten(0, -2), w).unflatten(0, x.shape[:-1])


def in_two_formats(x: Tokens) -> tuple[Tokens, Tokens]:
    """x for the residual, as it is, and x for the branch, in autocast's format.

    Left to autocast, the branch's gradient is cast in one pass and added in another; here both are
    one. Without autocast, and in float64, which it leaves alone, both are x itself; compiled, too:
    a compiler joins the passes itself, and gives up where a function has a ``jvp``.
    """
    if torch.compiler.is_compiling() or not has_autocast(x.device) or x.dtype == torch.float64:
        return x, x
    return _TwoFormats.apply(x, torch.get_autocast_dtype(x.device.type))  # type: ignore[return-value]


class _TwoFormats(torch.autograd.Function):
    """x ↦ (x, x in another format)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, dtype):
        return x.view_as(x), x.to(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx, *grad_outputs):
        as_it_is, cast = grad_outputs
        return as_it_is + cast, None

    @staticmethod
    def jvp(ctx, *grad_inputs):
        return grad_inputs[0].view_as(grad_inputs[0]), grad_inputs[0].to(ctx.dtype)
