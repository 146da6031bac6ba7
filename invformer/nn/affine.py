"""Affine maps of tokens, in few passes over them."""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import has_autocast, without_autocast

# Sequences of vectors, (*batch, N, D).
Tokens = Float[Tensor, "*batch tokens width"]


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


def kept_and_read(x: Tokens) -> tuple[Tokens, Tokens]:
    """x for the residual and for the branch, which reads it in autocast's format.

    As if autocast formatted it, but in the backward pass both gradients are added in one pass.
    """
    if not has_autocast(x.device):
        return x, x
    return _Fork.apply(x, torch.get_autocast_dtype(x.device.type))  # type: ignore[return-value]


class _Fork(torch.autograd.Function):
    """x, and x in another format."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.view_as(x), x.to(dtype)

    @staticmethod
    def backward(ctx, *grad_outputs):
        kept, read = grad_outputs
        return kept + read, None
