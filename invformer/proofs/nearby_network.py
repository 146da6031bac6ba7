"""The stack of a model in rows of plain float64 with one bound on the error of each."""

from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor, nn

from invformer.branches.nearby import UP, Map, Rows, U, of_sum
from invformer.numerics.enclosure import length_up
from invformer.numerics.spectral_norm import spectral_norm_bound
from invformer.proofs.enclosed_network import Network


class NearbyNetwork:
    """The states of a :class:`.Network` for about the work of a forward pass, less accurately.

    An error of a branch's inner numbers, of length e, is at most e ‖V A⁻¹ A′‖₂ where a later branch
    reads A′ x + B′. What sums of channels round is kept channel by channel.
    """

    def __init__(self, network: Network) -> None:
        self.symbols, self.positions = network.symbols.middle, network.positions.middle
        self.padding, self.branches = network.padding, [step.branch for step in network.steps]
        views = [*network.steps, network.top]
        self.factors = torch.stack([view.factor.middle for view in views])
        self.shifts = torch.stack([view.shift.middle for view in views])
        radii = torch.stack([view.shift.radius for view in views])
        self.of_shifts = 8 * U * length_up(self.shifts) + length_up(radii.double())
        self.reads = [
            [Map(w.middle, u) for w, u in zip(b.reads[: b.num_reads], b.read_units, strict=False)]
            for b in self.branches
        ]
        # V A⁻¹, and norms of (units V) A⁻¹ A′ for every later view: an error's, and of rounding.
        self.writes = [s.branch.weights[-1].middle / s.factor.middle for s in network.steps]
        self.norms: list[tuple[Tensor, Tensor]] = []
        for index, (branch, v) in enumerate(zip(self.branches, self.writes, strict=True)):
            scaled = v if branch.units is None else v * branch.units[:, None]
            seen = scaled * self.factors[index + 1 :].unsqueeze(1)  # (views, inner, D)
            size = torch.linalg.matrix_norm(seen) * UP
            norm = spectral_norm_bound(seen) + 16 * U * size
            self.norms.append((norm, of_sum(len(v) + 4) * size))

    @staticmethod
    def is_possible(network: Network) -> bool:
        """True if there are formulas for every branch, and nothing between it and the channels."""
        return all(s.makes is None and s.branch.has_rows for s in network.steps)

    def __call__(
        self,
        symbols: Integer[Tensor, "rows"],
        places: Integer[Tensor, "rows"],
        past: list[Any],
    ) -> tuple[Rows, list[Any]]:
        """As :class:`.Network`, of symbols that continue a text that is :meth:`remembered`."""
        x = self.symbols[symbols] + self.positions[places]
        x = nn.functional.pad(x, (0, self.padding))
        rounded = U * x.abs()
        errors: list[tuple[Tensor, Tensor]] = []
        for index, branch in enumerate(self.branches):
            seen, size = self.seen(index, x, rounded, errors)
            z = [w(seen, size) for w in self.reads[index]]
            value, size = branch.nearby(z, places, past[index])
            x = x + value.value @ self.writes[index]
            rounded.add_(x.abs(), alpha=U)
            errors.append((value.error, size))
        return self.seen(len(self.branches), x, rounded, errors)[0], past

    def remembered(self, kept: list[Any]) -> list[Any]:
        """A text, from what a :class:`.Network` has kept of it."""
        pairs = zip(self.branches, kept, strict=True)
        return [branch.remembered(own) for branch, own in pairs]

    def seen(
        self, view: int, x: Tensor, rounded: Tensor, errors: list[tuple[Tensor, Tensor]]
    ) -> tuple[Rows, Tensor]:
        """A x + B, and its length."""
        u = torch.addcmul(self.shifts[view], x, self.factors[view])
        size = length_up(u)
        error = length_up(rounded * self.factors[view]) + 8 * U * size + self.of_shifts[view]
        for index, (inner, inner_size) in enumerate(errors):
            norms, roundings = (each[view - index - 1] for each in self.norms[index])
            error = error + norms * inner + roundings * inner_size
        return Rows(u, error * UP), size
