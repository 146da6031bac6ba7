"""The least distance between any two of many points, in memory linear in their number."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import unit_roundoff

# Up to this many points all their distances are computed as they are: 64 MiB of them.
MOST_DIRECT = 4096


def least_distance(points: Float[Tensor, "points width"]) -> float:
    """min_{i<j} ‖p_i − p_j‖₂, in float64; inf if there are not two points.

    Of more than ``MOST_DIRECT`` points rounded down: their distances come from products,
    ‖p_i‖² + ‖p_j‖² − 2 p_i·p_j relative to the mean, less what those may have rounded. So of points
    nearer than 1e-7 of their spread it may say zero.
    """
    points = points.double()
    count, width = points.shape
    if count <= MOST_DIRECT:
        distances = torch.nn.functional.pdist(points)
        return distances.min().item() if distances.numel() else math.inf
    points = points - points.mean(0)
    squares = points.square().sum(-1)
    least = torch.full((), math.inf, dtype=torch.float64, device=points.device)
    at_once = max(1, MOST_DIRECT**2 // 2 // count)
    for begin in range(0, count, at_once):
        rows = slice(begin, begin + at_once)
        sums = squares[rows, None] + squares[begin:]
        apart = sums.addmm_(points[rows], points[begin:].mT, alpha=-2)
        apart.diagonal().fill_(math.inf)  # of a point and itself
        least = torch.minimum(least, apart.min())
    rounded = 4 * (width + 4) * unit_roundoff(torch.float64) * squares.max()
    return (least - rounded).clamp(min=0).sqrt().item()
