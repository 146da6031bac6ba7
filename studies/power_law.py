"""A power law C mᵅ through measured points, with a bootstrap interval for its exponent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float64
NUM_RESAMPLES = 1000
TAIL = 0.025  # of the interval, on either side


@dataclass(frozen=True)
class Fit:
    """C mᵅ through a curve, with an interval for α; ``variable`` is what m is called."""

    coefficient: float
    exponent: float
    low: float
    high: float
    variable: str = "n"

    def __str__(self) -> str:
        exponent = f"{self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.coefficient:.3g} {self.variable}^{exponent}"


def fit(points: Sequence[tuple[int, Sequence[float]]], variable: str = "n") -> Fit | None:
    """log L = log C + α log m by least squares; the 95 % interval resamples lengths and sequences.

    ``points`` are m and the constants of its sequences, of which the k-th belong together. None for
    less than three of them.
    """
    if len(points) < 3:
        return None
    m = torch.tensor([m for m, _ in points], dtype=DTYPE).log()
    values = torch.tensor([list(v) for _, v in points], dtype=DTYPE).log()
    generator = torch.Generator().manual_seed(0)
    lengths, chosen = [], []
    for _ in range(NUM_RESAMPLES):
        lengths.append(torch.randint(len(m), (len(m),), generator=generator))
        chosen.append(torch.randint(values.shape[1], (values.shape[1],), generator=generator))
    at = torch.stack(lengths)
    differ = (at != at[:, :1]).any(-1)
    some = values[at[..., None], torch.stack(chosen)[:, None]].mean(-1)
    slopes = line(m[at], some)[1][differ]
    low, high = slopes.quantile(m.new_tensor([TAIL, 1 - TAIL])).tolist()
    intercept, exponent = (x.item() for x in line(m, values.mean(1)))
    return Fit(math.exp(intercept), exponent, low, high, variable)


def line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Intercept and slope of the least-squares line of the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    slope = (centred * y).sum(-1) / centred.square().sum(-1)
    return y.mean(-1) - slope * x.mean(-1), slope
