"""Invertible scalings of channels u = D x + b: ActivationNorm, weighted norms of branches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.numerics.norms import Tokens

# A channel with a smaller deviation is left as it is: no branch has written to it yet.
LEAST_DEVIATION = 1e-6
# A branch reads this share of the channels it writes to while the size of its output is measured.
SHARE_READ = 0.02
# Standard deviation of a branch's first output in the channels it writes to; tokens have about one.
INITIAL_OUTPUT_DEVIATION = 0.5
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
        return torch.addcmul(self.shift, x, self.scale)

    def undo(self, u: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """D⁻¹ (u − b)."""
        return (u - self.shift) * self.inverse

    def unbind(self) -> list["ScalingWeights"]:
        """Several scalings, one by one."""
        return list(map(ScalingWeights, *self))


class DiagonalScaling(nn.Module):
    """u = D x + b with D = diag(e^s) > 0: the coordinates in which one residual branch contracts.

    x ↦ D⁻¹ f(D x + b) with Lip(f) ≤ c contracts in the weighted norm max_i ‖D x_i‖₂. A branch may
    write large values to a channel if it reads little from it: if D is small there
    (docs/numerics.md §18). ``written`` are the channels that it writes large values to at first.
    """

    def __init__(self, d_model: int, written: Integer[Tensor, "count"] | None = None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model))
        self.written = written

    def weights(self) -> ScalingWeights:
        """s, D, D⁻¹ and b as they are now."""
        return exponentials(self.log_scale, self.shift)

    def forward(self, x: Tokens, weights: ScalingWeights | None = None) -> Tokens:
        """D x + b."""
        return (weights or self.weights()).apply(x)

    @torch.no_grad()
    def initialise_for(self, branch: Callable[[Tensor], Tensor], x: Tokens) -> None:
        """Set D and b so that the branch reads this batch with mean zero and deviation at most one.

        It reads so little from the channels in ``written`` that it writes to them with the
        deviation ``INITIAL_OUTPUT_DEVIATION``.
        """
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        most = 1 / std.clamp(min=1.0)  # small channels stay small: they may be meant for others
        scale = most.clone()
        written = [] if self.written is None else self.written.to(x.device)
        scale[written] *= SHARE_READ
        self._set(scale, mean)
        wanted = branch(self(x)).flatten(0, -2).std(dim=0)[written] / INITIAL_OUTPUT_DEVIATION
        scale[written] = wanted.clamp(min=LEAST_SCALE).minimum(most[written])
        self._set(scale, mean)

    def _set(self, scale: Tensor, mean: Tensor) -> None:
        """D, and b such that a channel with this mean is read with mean zero."""
        self.log_scale.copy_(scale.log())
        self.shift.copy_(-mean * scale)


class ActivationNorm(DiagonalScaling):
    """A layer y = D x + b, normalised for one batch (Kingma & Dhariwal 2018, "actnorm").

    :meth:`initialise` chooses D and b so that the batch leaves with zero mean and unit variance in
    every channel that is not constant; afterwards both are ordinary parameters.
    """

    @torch.no_grad()
    def initialise(self, x: Tokens) -> None:
        """Set D and b from a batch."""
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        varies = std > LEAST_DEVIATION
        self.log_scale.copy_(torch.where(varies, -std.clamp(min=LEAST_DEVIATION).log(), 0.0))
        self.shift.copy_(torch.where(varies, -mean * self.log_scale.exp(), 0.0))

    def transposed(
        self, x: Tokens, weights: ScalingWeights, v: Tokens, **options: Any
    ) -> tuple[Tokens, Tokens]:
        """y = D x + b, recorded, and D⁻¹v: the w with (∂y/∂x)ᵀ w = v."""
        return weights.apply(x), (v * weights.inverse).detach()


def scalings_together(scalings: Sequence[DiagonalScaling]) -> ScalingWeights:
    """The weights of several scalings as (scalings, width)."""
    log_scale = torch.stack([scaling.log_scale for scaling in scalings])
    return exponentials(log_scale, torch.stack([scaling.shift for scaling in scalings]))


def exponentials(log_scale: Tensor, shift: Tensor) -> ScalingWeights:
    """s, e^s, e^{−s} and b."""
    return ScalingWeights(log_scale, log_scale.exp(), (-log_scale).exp(), shift)


def written_channels(
    d_model: int, block: int, count: int | None = None, first: int = 0
) -> tuple[Integer[Tensor, "count"], Integer[Tensor, "count"]]:
    """The channels that the two branches of a block first write to, one branch after the other.

    Args:
        d_model: width; behind its last channel comes the first again.
        count: channels of each branch; None is a quarter of them, at least one.
        first: where block 0 begins; where the embedding leaves channels free, these come first.
    """
    count = max(1, d_model // 4) if count is None else count
    attention = (first + 2 * block * count + torch.arange(count)) % d_model
    return attention, (attention + count) % d_model
