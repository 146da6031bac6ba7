"""What local bounds allow for rounding, absolute where terms cancel, and relative elsewhere."""

import torch
from torch import Tensor


def square_distances(a: Tensor, b: Tensor, slack: Tensor | float) -> Tensor:
    """‖a_i − b_j‖², from above if the slack covers rounding: cancellation is absolute."""
    square = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2)
    return (square - 2 * a @ b.mT).clamp_min(0) + slack


def row_normalised(p: Tensor) -> Tensor:
    """P with rows that sum to one in float64."""
    p = p.double()
    return p / p.sum(-1, keepdim=True)


def rounding(z: Tensor) -> Tensor:
    """Outward allowance for second moments of the rows of z, (…, 1)."""
    largest = z.square().sum(-1).amax(-1, keepdim=True)
    return 8 * sum(z.shape[-2:]) * torch.finfo(z.dtype).eps * largest


def outward(bound: Tensor, inputs: Tensor) -> Tensor:
    """The bound, enlarged by its rounding and by the rounding of its inputs; inf for NaN."""
    size, eps = sum(inputs.shape[-3:]), torch.finfo(inputs.dtype).eps
    bound = bound * (1 + 1e-13 * size + (100 * eps if inputs.dtype != torch.float64 else 0))
    return torch.where(bound.isnan(), torch.inf, bound)
