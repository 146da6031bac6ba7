"""Invertible scalings of channels u = D x + b: ActivationNorm, weighted norms of branches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.nn.affine import Tokens, scale_shift

# A channel with a smaller deviation is left as it is: no branch has written to it yet.
SILENT = 1e-6
# Share of its loud channels that a branch reads while the size of what it writes is measured.
NEARLY_SILENT = 0.02
# Standard deviation of what a branch first writes to its loud channels: tokens have about one.
INITIAL_LOUDNESS = 0.5
# A branch that writes nothing at first would need a scale of zero.
LEAST_SCALE = 1e-4


class ScalingWeights(NamedTuple):
    """s, D = e^s, D⁻¹ and b, each (width,); of several scalings (scalings, width)."""

    log_scale: Tensor
    scale: Tensor
    inverse: Tensor
    shift: Tensor

    def apply(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """D x + b."""
        return scale_shift(x, self.scale, self.shift)

    def undo(self, u: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """D⁻¹ (u − b)."""
        return (u - self.shift) * self.inverse


class DiagonalScaling(nn.Module):
    """u = D x + b with D = diag(e^s) > 0: the coordinates in which one residual branch contracts.

    y = x + D⁻¹ f(D x + b) with Lip(f) ≤ c contracts in the weighted norm max_i ‖D x_i‖₂: the
    smaller D is in a channel, the less the branch reads from it and the more it may write to it.
    Where every branch writes much to channels of its own and reads the others, it adds as much to
    them as they carry, although nothing that it adds depends on them by more than c
    (docs/numerics.md).

    Args:
        d_model: width.
        loud: indices of the channels that the branch writes large values to at first.
    """

    def __init__(self, d_model: int, loud: Integer[Tensor, "count"] | None = None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model))
        self.loud = loud

    def weights(self) -> ScalingWeights:
        """s, D, D⁻¹ and b as they are now."""
        return exponentials(self.log_scale, self.shift)

    def forward(self, x: Tokens, weights: ScalingWeights | None = None) -> Tokens:
        """D x + b."""
        return (weights or self.weights()).apply(x)

    def inverse(self, u: Tokens, weights: ScalingWeights | None = None) -> Tokens:
        """D⁻¹ (u − b), exact up to rounding."""
        return (weights or self.weights()).undo(u)

    @torch.no_grad()
    def initialise_for(self, branch: Callable[[Tensor], Tensor], x: Tokens) -> None:
        """Set D and b so that the branch reads this batch with mean zero and deviation at most one.

        It reads next to nothing from its loud channels: so little that it writes to them with the
        deviation ``INITIAL_LOUDNESS``.
        """
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        most = 1 / std.clamp(min=1.0)  # small channels stay small: they may be meant for others
        scale = most.clone()
        loud = [] if self.loud is None else self.loud.to(x.device)
        scale[loud] *= NEARLY_SILENT
        self._set(scale, mean)
        written = branch(self(x)).flatten(0, -2).std(dim=0)[loud]
        scale[loud] = (written / INITIAL_LOUDNESS).clamp(min=LEAST_SCALE).minimum(most[loud])
        self._set(scale, mean)

    def _set(self, scale: Tensor, mean: Tensor) -> None:
        """D, and b such that a channel with this mean is read with mean zero."""
        self.log_scale.copy_(scale.log())
        self.shift.copy_(-mean * scale)


class ActivationNorm(DiagonalScaling):
    """A layer y = D x + b, normalised for one batch (Kingma & Dhariwal 2018, "actnorm").

    :meth:`initialise` chooses D and b so that the batch leaves with zero mean and unit variance in
    every channel that carries a signal; afterwards both are ordinary parameters.

    Args:
        d_model: width.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)

    @torch.no_grad()
    def initialise(self, x: Tokens) -> None:
        """Set D and b so that this batch leaves with zero mean and unit variance per channel."""
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        carries_signal = std > SILENT
        self.log_scale.copy_(torch.where(carries_signal, -std.clamp(min=SILENT).log(), 0.0))
        self.shift.copy_(torch.where(carries_signal, -mean * self.log_scale.exp(), 0.0))


def scalings_together(scalings: Sequence[DiagonalScaling]) -> ScalingWeights:
    """The weights of several scalings as (scalings, width)."""
    log_scale = torch.stack([scaling.log_scale for scaling in scalings])
    return exponentials(log_scale, torch.stack([scaling.shift for scaling in scalings]))


def exponentials(log_scale: Tensor, shift: Tensor) -> ScalingWeights:
    """s, e^s, e^{−s} and b."""
    return ScalingWeights(log_scale, log_scale.exp(), (-log_scale).exp(), shift)


def loud_channels(
    d_model: int, block: int, count: int | None = None, first: int = 0
) -> tuple[Integer[Tensor, "count"], Integer[Tensor, "count"]]:
    """The channels that both branches of a block first write to: each after those of the last.

    Args:
        d_model: width; behind its last channel comes the first again.
        block: number of the block.
        count: channels of each branch; None is a quarter of them, at least one.
        first: where block 0 begins; where the embedding leaves channels free, these come first.
    """
    count = max(1, d_model // 4) if count is None else count
    attention = (first + 2 * block * count + torch.arange(count)) % d_model
    return attention, (attention + count) % d_model
