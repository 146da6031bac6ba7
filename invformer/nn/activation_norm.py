"""ActivationNorm: a per-channel affine map, initialised from data, exactly invertible."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Channels that no branch has written to yet have no scale to learn from the first batch.
SILENT = 1e-6


class ActivationNorm(nn.Module):
    """y = x · e^s + b per channel (Kingma & Dhariwal 2018, "actnorm").

    :meth:`initialise` chooses s and b so that the batch it sees leaves with zero mean and unit
    variance in every channel that carries a signal; afterwards both are ordinary parameters.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(d_model))
        self.shift = nn.Parameter(torch.zeros(d_model))

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """x · e^s + b."""
        return torch.addcmul(self.shift, x, self.log_scale.exp())

    def inverse(
        self, y: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """(y − b) · e^{−s}, exact up to rounding."""
        return (y - self.shift) * (-self.log_scale).exp()

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "*batch tokens width"]) -> None:
        """Set s and b so that this batch leaves with zero mean and unit variance per channel."""
        std, mean = torch.std_mean(x.flatten(0, -2), dim=0)
        carries_signal = std > SILENT
        self.log_scale.copy_(torch.where(carries_signal, -std.clamp(min=SILENT).log(), 0.0))
        self.shift.copy_(torch.where(carries_signal, -mean * self.log_scale.exp(), 0.0))
