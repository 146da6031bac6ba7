"""Affine maps of tokens, in few passes over them."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Sequences of vectors, (*batch, N, D).
Tokens = Float[Tensor, "*batch tokens width"]


def require_width(x: Tokens, width: int) -> None:
    """Raise ValueError, which names both widths, for tokens of another width."""
    if x.shape[-1] != width:
        raise ValueError(
            f"tokens have width {x.shape[-1]}, the layer has width {width}: "
            f"x has shape {tuple(x.shape)}, expected (*batch, tokens, {width})"
        )


def scale_shift(x: Tokens, scale: Float[Tensor, "width"], shift: Float[Tensor, "width"]) -> Tokens:
    """x · a + b per channel."""
    require_width(x, len(scale))
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return torch.addcmul(shift, x, scale)
    return ScaleShift.apply(x, scale, shift)


def affine(
    x: Float[Tensor, "*batch tokens inputs"],
    w: Float[Tensor, "inputs outputs"],
    b: Float[Tensor, "outputs"] | None = None,
    centre: Float[Tensor, "inputs"] | None = None,
) -> Float[Tensor, "*batch tokens outputs"]:
    """(x + m) W + b in one pass over the tokens."""
    require_width(x, len(w))
    if centre is not None:
        b = w.mT @ centre if b is None else torch.addmv(b, w.mT, centre)
    return x @ w if b is None else torch.addmm(b, x.flatten(0, -2), w).unflatten(0, x.shape[:-1])


class ScaleShift(torch.autograd.Function):
    """x · a + b per channel; autograd's own gradient passes over the tokens twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """x · a + b."""
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g · a, Σ g · x and Σ g, the sums over tokens."""
        (g,) = gradients
        x, scale = ctx.saved_tensors
        dx = (g * scale).to(x.dtype)
        if torch.is_grad_enabled():  # the operator below has no second derivative without a mean
            return dx, (g * x).sum_to_size(scale.shape), g.sum_to_size(scale.shape)
        return dx, *sums_over_tokens(g, x.to(g.dtype))


def sums_over_tokens(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g · x and Σ g in one pass: a LayerNorm's weight gradients at mean 0 and deviation 1."""
    width = g.shape[-1]
    g, x = g.reshape(-1, width), x.reshape(-1, width)
    mean, rate = g.new_zeros(len(g), 1), g.new_ones(len(g), 1)
    unused = g.new_ones(width)
    _, products, plain = torch.ops.aten.native_layer_norm_backward(
        g, x, [width], mean, rate, unused, unused, [False, True, True]
    )
    return products, plain
