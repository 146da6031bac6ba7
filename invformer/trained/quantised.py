"""Weights in few bits: matrices of integers, with one scale for each output channel.

A certified layer divides by a bound on the norm of the matrix it is given, so the certificate is
proven for the rounded matrices. Vectors, scalings and positions stay as they are.
"""

import copy
import math

import torch
from torch import Tensor

from invformer.errors import ConfigurationError
from invformer.nn.transformer import CharTransformer
from invformer.runs.packed import BITS, Rounded

NUM_SCALES = 40  # tried for a channel
KEPT = ("log_", "position")  # scalings, temperatures, and positions


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
