"""Affine maps of tokens, in few passes over them."""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import without_autocast

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
