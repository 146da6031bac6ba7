"""Metrics of the channels, in which residual branches contract."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.nn.activation_norm import ActivationNorm, ChannelAffine

# While a branch is asked how loud it is, the channels it will write to are this quiet to it.
NEARLY_SILENT = 0.02
# Standard deviation of what a branch first writes to its loud channels: tokens have about one.
INITIAL_LOUDNESS = 0.5
# A branch that writes nothing at first would need a metric of zero.
LEAST_SCALE = 1e-4


class Metrics(NamedTuple):
    """D, D⁻¹ and m = D⁻¹ b of several metrics, each (metrics, D): u = D x + b = D (x + m)."""

    scale: Tensor
    inverse: Tensor
    centre: Tensor


class ChannelMetric(ActivationNorm):
    """The coordinates u = x · e^s + b in which one residual branch contracts.

    y = x + e^{−s} · f(x · e^s + b) with Lip(f) ≤ c contracts in max_i ‖e^s · x_i‖₂: the smaller
    e^s of a channel, the less the branch reads of it and the louder it may write to it. Where every
    branch is loud in channels of its own and reads the others, it adds as much to them as they
    carry, although nothing that it adds depends on them by more than c. The same functions as
    with ActivationNorm, which says by how much coordinates change from branch to branch
    (docs/numerics.md has both).

    Args:
        d_model: width.
        loud: indices of the channels that the branch writes loudly to at first.
    """

    def __init__(self, d_model: int, loud: Tensor) -> None:
        super().__init__(d_model)
        self.loud = loud

    @torch.no_grad()
    def initialise_for(
        self, branch: Callable[[Tensor], Tensor], x: Float[Tensor, "*batch tokens width"]
    ) -> None:
        """Set s and b: channels of this batch are read with mean zero and at most variance one.

        But of the loud channels next to nothing is read, so little that f writes to them with the
        deviation ``INITIAL_LOUDNESS``.
        """
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        scale = 1 / std.clamp(min=1.0)  # a whisper stays a whisper: it may be meant for others
        loud = self.loud.to(x.device)
        scale[loud] *= NEARLY_SILENT
        self._set(scale, mean)
        written = branch(self(x)).flatten(0, -2).std(dim=0)[loud]
        scale[loud] = (written / INITIAL_LOUDNESS).clamp(LEAST_SCALE, 1.0)
        self._set(scale, mean)

    def _set(self, scale: Tensor, mean: Tensor) -> None:
        """e^s, and b such that a channel with this mean is read with mean zero."""
        self.log_scale.copy_(scale.log())
        self.shift.copy_(-mean * scale)


def metrics_of(metrics: Sequence[ChannelMetric]) -> Metrics:
    """What forward passes in several metrics need of them, at once."""
    log_scale = torch.stack([metric.log_scale for metric in metrics])
    inverse = (-log_scale).exp()
    return Metrics(
        log_scale.exp(), inverse, torch.stack([metric.shift for metric in metrics]) * inverse
    )


def loud_channels(
    d_model: int, block: int, count: int | None = None, first: int = 0
) -> tuple[Integer[Tensor, "count"], Integer[Tensor, "count"]]:
    """Where both branches of a block are loud at first: each where the one before it ends.

    Args:
        d_model: width; behind its last channel comes the first again.
        block: number of the block.
        count: channels of each branch; None is a quarter of them, at least one.
        first: where block 0 begins; where the embedding leaves channels free, these come first.
    """
    count = max(1, d_model // 4) if count is None else count
    attention = (first + 2 * block * count + torch.arange(count)) % d_model
    return attention, (attention + count) % d_model


class ChangeOfMetric(ChannelAffine):
    """From the coordinates of one metric to those of another; None has plain coordinates.

    The metrics are their block's, not registered here a second time.

    Args:
        before: whose coordinates come in.
        after: whose coordinates leave.
    """

    def __init__(self, before: ChannelMetric | None, after: ChannelMetric | None) -> None:
        super().__init__()
        self.ends = (before, after)

    @property
    def log_scale(self) -> Float[Tensor, "width"]:  # type: ignore[override]
        """s of ``after`` less that of ``before``."""
        before, after = self.ends
        if before is None:
            assert after is not None
            return after.log_scale
        return -before.log_scale if after is None else after.log_scale - before.log_scale

    @property
    def shift(self) -> Float[Tensor, "width"]:  # type: ignore[override]
        """b of ``after`` less what becomes of that of ``before``."""
        before, after = self.ends
        if before is None:
            assert after is not None
            return after.shift
        undone = -before.shift * self.log_scale.exp()
        return undone if after is None else after.shift + undone
