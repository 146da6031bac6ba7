"""Weights in few bits: matrices of integers, with one scale for each output channel.

A certified layer divides by a bound on the norm of the matrix it is given, so the certificate is
proven for the rounded matrices. Vectors, scalings and positions stay as they are.
"""

import copy
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Int8
from torch import Tensor

from invformer.errors import ConfigurationError
from invformer.nn.transformer import CharTransformer

NUM_SCALES = 40  # tried for a channel
BITS = range(2, 9)  # integers are int8
INTEGERS, SCALE = ".integers", ".scale"
KEPT = ("log_", "position")  # scalings, temperatures, and positions


class Rounded(NamedTuple):
    """A matrix as integers of ``bits`` bits times a scale for each output channel, in float16."""

    integers: Int8[Tensor, "*shape"]
    scale: Tensor
    bits: int

    def value(self) -> Tensor:
        """The matrix; its entries are exact in float32."""
        return self.integers.float() * self.scale.float()


def rounded(weight: Tensor, bits: int, input_dim: int) -> Rounded:
    """The nearest of 2^bits − 1 levels around zero, with the scales of least squared error.

    A scale is shared along ``input_dim``: every output channel has its own.
    """
    max_integer = 2 ** (bits - 1) - 1
    max_weight = weight.abs().amax(input_dim, keepdim=True)
    integers, scales = torch.zeros_like(weight), torch.zeros_like(max_weight)
    least_error = torch.full_like(max_weight, math.inf)
    for shrink in torch.linspace(1, 0.3, NUM_SCALES).tolist():
        scale = (max_weight * shrink / max_integer).half().to(weight)
        tried = (weight / scale).nan_to_num(0)  # 0/0 in a row of zeros
        tried = tried.round().clamp(-max_integer, max_integer)
        error = (tried * scale - weight).square().sum(input_dim, keepdim=True)
        is_better = error < least_error
        integers = torch.where(is_better, tried, integers)
        scales = torch.where(is_better, scale, scales)
        least_error = torch.minimum(error, least_error)
    return Rounded(integers.to(torch.int8), scales.half(), bits)


@torch.no_grad()
def quantised(model: CharTransformer, bits: int) -> tuple[CharTransformer, dict[str, Rounded]]:
    """A copy of the model with rounded matrices, and these by the names of its parameters."""
    if bits not in BITS:
        raise ConfigurationError(f"bits: {bits} is not in [{BITS[0]}, {BITS[-1]}]")
    model, matrices = copy.deepcopy(model), {}
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or any(word in name for word in KEPT):
            continue
        is_ours = model.is_invertible and name.startswith("stack")
        input_dim = -2 if is_ours else -1  # our branches compute x W, nn.Linear computes x Wᵀ
        matrices[name] = rounded(weight, bits, input_dim)
        weight.copy_(matrices[name].value())
    return model, matrices


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
