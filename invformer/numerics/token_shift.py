"""Sequences moved along by some tokens, and the adjoints of that."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.numerics.norms import Tokens


def delay(x: Tokens, lag: int = 1) -> Tokens:
    """x_{i−lag} at token i; zeros where there is none."""
    return F.pad(x, (0, 0, lag, 0))[..., : x.shape[-2], :]


def advance(x: Tokens) -> Tokens:
    """x_{i+1} at token i; zero at the last: the adjoint of :func:`delay` by one token."""
    return F.pad(x, (0, 0, 0, 1))[..., 1:, :]


def windows(x: Tokens, kernel: int) -> Float[Tensor, "*batch tokens kernel_width"]:
    """[x_i, x_{i−1}, …, x_{i−kernel+1}] at token i."""
    return x if kernel == 1 else torch.cat([delay(x, lag) for lag in range(kernel)], dim=-1)
