"""Dropout whose masks depend on seed, sample and layer, whichever process computes them."""

import torch
from jaxtyping import Int32
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLIERS = 0x7FEB352D, 0x846CA68B - (1 << 32)


class Dropout(nn.Module):
    """While training x ↦ m x / (1 − p), where an entry of the mask m is 0 with probability p.

    After :func:`set_sample_keys` the mask is a hash of the sample's key and of the entry's place;
    before, it is drawn from PyTorch's generator.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """A sample is one entry of the first dimension."""
        if self.keys is None or self.p == 0 or not self.training:
            return F.dropout(x, self.p, self.training)
        place = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device)
        number = hashed(hashed(place) ^ self.keys[:, None]).view_as(x)
        kept = number >= int((self.p - 0.5) * 2**32)
        return x * (kept.to(x.dtype) / (1 - self.p))


def sample_keys(seed: int, first: int, count: int) -> Int32[Tensor, "batch"]:
    """Keys of the samples ``first``, ``first + 1``, … of an endless order."""
    samples = torch.arange(first, first + count)
    low, high = samples.to(torch.int32), (samples >> 32).to(torch.int32)
    return hashed(low ^ hashed(high ^ hashed(torch.tensor(seed - (1 << 31), dtype=torch.int32))))


def set_sample_keys(model: nn.Module, keys: Int32[Tensor, "batch"] | None) -> None:
    """Use the masks of these samples in the next forward pass; None draws masks at random again.

    Layers have different masks: they are numbered in the order of the model's modules.
    """
    for number, layer in enumerate(m for m in model.modules() if isinstance(m, Dropout)):
        salt = int(hashed(torch.tensor(number, dtype=torch.int32)))
        layer.keys = None if keys is None else hashed(keys ^ salt)


def hashed(x: Int32[Tensor, "*shape"]) -> Int32[Tensor, "*shape"]:
    """A bijection of 32-bit numbers whose results look random.

    Source: C. Wellons 2018, "Prospecting for hash functions", lowbias32.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * MULTIPLIERS[0]
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * MULTIPLIERS[1]
    return x ^ ((x >> 16) & 0xFFFF)
