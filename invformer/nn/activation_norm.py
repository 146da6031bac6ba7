"""Per-channel affine maps, exactly invertible; ActivationNorm, initialised from data."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Channels that no branch has written to yet have no scale to learn from the first batch.
SILENT = 1e-6


class ChannelWeights(NamedTuple):
    """e^s and b of x · e^s + b."""

    scale: Tensor
    shift: Tensor


class ChannelAffine(nn.Module):
    """y = x · e^s + b per channel. Subclasses say where s, ``log_scale``, and b, ``shift``, are."""

    log_scale: Tensor
    shift: Tensor
    # Held inside frozen_weights: a token by itself takes less time than computing them.
    _frozen: ChannelWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy computes its own: nobody would release what is held here."""
        return {key: value for key, value in self.__dict__.items() if key != "_frozen"}

    def effective_weights(self) -> ChannelWeights:
        """The present e^s and b."""
        return ChannelWeights(self.log_scale.exp(), self.shift)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """x · e^s + b."""
        scale, shift = self._frozen or self.effective_weights()
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return torch.addcmul(shift, x, scale)
        return ScaleShift.apply(x, scale, shift)

    def inverse(
        self, y: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """(y − b) · e^{−s}, exact up to rounding."""
        return (y - self.shift) * (-self.log_scale).exp()


class ActivationNorm(ChannelAffine):
    """y = x · e^s + b per channel (Kingma & Dhariwal 2018, "actnorm").

    :meth:`initialise` chooses s and b so that the batch it sees leaves with zero mean and unit
    variance in every channel that carries a signal; afterwards both are ordinary parameters.

    Args:
        d_model: width.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model))

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "*batch tokens width"]) -> None:
        """Set s and b so that this batch leaves with zero mean and unit variance per channel."""
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        carries_signal = std > SILENT
        self.log_scale.copy_(torch.where(carries_signal, -std.clamp(min=SILENT).log(), 0.0))
        self.shift.copy_(torch.where(carries_signal, -mean * self.log_scale.exp(), 0.0))


class ScaleShift(torch.autograd.Function):
    """x · a + b per channel; what autograd makes of it passes over the tokens twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """x · a + b."""
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g · a, Σ g · x and Σ g, the sums over tokens."""
        (g,) = gradients
        x, scale = ctx.saved_tensors
        dx = (g * scale).to(x.dtype)
        if torch.is_grad_enabled():  # the operator below has no second derivative without a mean
            return dx, (g * x).sum_to_size(scale.shape), g.sum_to_size(scale.shape)
        return dx, *sums_over_tokens(g, x.to(g.dtype))


def sums_over_tokens(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g · x and Σ g in one pass: a LayerNorm's weight gradients at mean 0 and deviation 1."""
    width = g.shape[-1]
    g, x = g.reshape(-1, width), x.reshape(-1, width)
    mean, rate = g.new_zeros(len(g), 1), g.new_ones(len(g), 1)
    unused = g.new_ones(width)
    _, products, plain = torch.ops.aten.native_layer_norm_backward(
        g, x, [width], mean, rate, unused, unused, [False, True, True]
    )
    return products, plain
