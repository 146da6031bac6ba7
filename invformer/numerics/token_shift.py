"""Sequences moved along by some tokens, and the adjoints of that."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def delay(
    x: Float[Tensor, "*batch tokens width"], lag: int = 1
) -> Float[Tensor, "*batch tokens width"]:
    """x_{i−lag} at token i; zeros where there is none."""
    return F.pad(x, (0, 0, lag, 0))[..., : x.shape[-2], :]


def advance(
    x: Float[Tensor, "*batch tokens width"], lag: int = 1
) -> Float[Tensor, "*batch tokens width"]:
    """x_{i+lag} at token i; zeros where there is none: the adjoint of :func:`delay`."""
    return F.pad(x, (0, 0, 0, lag))[..., lag:, :]


def windows(
    x: Float[Tensor, "*batch tokens width"], kernel: int
) -> Float[Tensor, "*batch tokens kernel_width"]:
    """[x_i, x_{i−1}, …, x_{i−kernel+1}] at token i."""
    return x if kernel == 1 else torch.cat([delay(x, lag) for lag in range(kernel)], dim=-1)


def windows_adjoint(
    y: Float[Tensor, "*batch tokens kernel_width"], kernel: int
) -> Float[Tensor, "*batch tokens width"]:
    """Every token's sum over the windows it stands in: the adjoint of :func:`windows`."""
    if kernel == 1:
        return y
    first, *others = y.chunk(kernel, dim=-1)
    return first + sum(advance(part, lag) for lag, part in enumerate(others, start=1))
