"""Matrices of few bits in a file: integers without gaps, and a scale for each channel."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int8
from torch import Tensor

BITS = range(2, 9)  # integers are int8
INTEGERS, SCALE = ".integers", ".scale"


class Rounded(NamedTuple):
    """A matrix as integers of ``bits`` bits times a scale for each output channel, in float16."""

    integers: Int8[Tensor, "*shape"]
    scale: Tensor
    bits: int

    def value(self) -> Tensor:
        """The matrix; its entries are exact in float32."""
        return self.integers.float() * self.scale.float()


def packed(matrices: Mapping[str, Rounded]) -> dict[str, Tensor]:
    """The tensors to store: the bits of each matrix without gaps, and its scales."""
    stored = {name + SCALE: matrix.scale for name, matrix in matrices.items()}
    for name, (integers, _, bits) in matrices.items():
        positive = integers.flatten().cpu().int() + 2 ** (bits - 1)
        stored[name + INTEGERS] = regrouped(positive, bits, 8).to(torch.uint8)
    return stored


def unpacked(
    stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], bits: int
) -> dict[str, Tensor]:
    """Weights in the shapes of ``wanted``; matrices that :func:`packed` stored are restored.

    ValueError, before anything larger than what is stored is allocated, if they do not fit.
    """
    weights = {}
    for name, like in wanted.items():
        if name + INTEGERS not in stored:
            weights[name] = stored[name]
            continue
        kept, scale = stored[name + INTEGERS], stored[name + SCALE]
        fits = kept.dtype == torch.uint8 and kept.shape == (-(-like.numel() * bits // 8),)
        if not fits or torch.broadcast_shapes(scale.shape, like.shape) != like.shape:
            raise ValueError(f"{name!r:.80} does not have the shape {list(like.shape)}")
        positive = regrouped(kept.int(), 8, bits)[: like.numel()]
        integers = (positive - 2 ** (bits - 1)).to(torch.int8).view(like.shape)
        weights[name] = Rounded(integers, scale, bits).value()
    return weights


def regrouped(numbers: Tensor, bits: int, into: int) -> Tensor:
    """Integers of ``bits`` bits as integers of ``into`` bits: the same bits, lowest first."""
    single = (numbers[:, None] >> torch.arange(bits)) & 1
    padded = torch.nn.functional.pad(single.flatten(), (0, -single.numel() % into))
    return (padded.view(-1, into) << torch.arange(into)).sum(1)
