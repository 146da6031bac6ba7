"""Rows of plain float64 with one bound on the error of each: far cheaper than enclosures.

Rows x̃ stand for exact rows x with ‖x̃ − x‖₂ ≤ e. A matrix passes e on by its spectral norm, which
for certified branches is below what enclosures find entry by entry from the sizes of its entries.
docs/numerics.md §19 has the formulas.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.enclosure import Enclosure, length_up
from invformer.numerics.rounding import UNIT_ROUNDOFF as U
from invformer.numerics.spectral_norm import spectral_norm_bound

# No formula for an error rounds more than 2¹⁵ times before it is multiplied by this.
UP = 1 + 2.0**-36


class Rows(NamedTuple):
    """x̃ (…, rows, n) with ‖x̃ − x‖₂ ≤ ``error`` (…, rows)."""

    value: Tensor
    error: Tensor

    def __sub__(self, y: Enclosure) -> "Rows":
        y = y.single()
        value = self.value - y.middle
        return Rows(value, (self.error + length_up(y.radius)) * UP + U * length_up(value))

    def single(self) -> "Rows":
        """Itself."""
        return self

    def exact(self) -> "Rows":
        """The same without an error."""
        return Rows(self.value, torch.zeros_like(self.error))

    def at_least(self) -> Tensor:
        """As :meth:`.Enclosure.at_least`."""
        return self.value.abs() * (1 - 2.0**-30) - self.error.unsqueeze(-1)

    def norm_at_least(self) -> tuple[Tensor, Tensor]:
        """As :meth:`.Enclosure.norm_at_least`."""
        size = torch.linalg.vector_norm(self.value, dim=-1)
        return size * (1 - 2.0**-30) - self.error, self.error

    @staticmethod
    def of(x: Enclosure, units: Tensor | float = 1.0) -> "Rows":
        """The rows of an enclosure, with errors measured after division by ``units``."""
        x = x.single()
        return Rows(x.middle, length_up(x.radius / units) * UP)


class Map:
    """x ↦ x W of :class:`Rows`, whose error is measured after division by ``units``, (n,).

    A sum of n products errs by at most (n + 2) u Σ |x| |w| in any order, and that by at most
    (n + 2) u ‖x‖ ‖W‖_F in length.
    """

    def __init__(self, w: Float[Tensor, "n out"], units: Tensor | None = None) -> None:
        self.w = w
        scaled = w if units is None else w / units
        self.norm = spectral_norm_bound(scaled)
        self.rounding = of_sum(len(w)) * torch.linalg.matrix_norm(scaled) * UP

    def __call__(self, x: Rows, size: Tensor) -> Rows:
        """x W; ``size`` is the length of the rows x̃."""
        return Rows(x.value @ self.w, (self.norm * x.error + self.rounding * size) * UP)


def of_sum(n: int) -> float:
    """Twice the relative error of a sum of n products."""
    return 2 * (n + 2) * U
