"""Bits per character as a metric of torchmetrics, for any module and any number of processes."""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class BitsPerCharacter(Metric):
    """Σ −log₂ p / (number of characters), for any code length in nats.

    The sums are kept in float64 and int64, whatever the precision of the model: float32, as in
    torchmetrics' ``Perplexity``, drifts by 4e-5 over a million characters. Processes are added up
    by :meth:`compute`, which is exact to rounding.
    """

    is_differentiable, higher_is_better, full_state_update = False, False, False
    nats: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("nats", zero, dist_reduce_fx="sum")
        self.add_state("count", zero.long(), dist_reduce_fx="sum")

    def update(self, nats: Tensor | float, count: Tensor | int) -> None:
        """Add characters: Σ −ln p of them, and how many there are. Nothing waits for the device."""
        self.nats = self.nats.double() + nats  # double: module.to(bfloat16) casts it
        self.count = self.count + count

    def compute(self) -> Tensor:
        """Bits per character, a float64 scalar; NaN without characters."""
        return self.nats / self.count / math.log(2)
