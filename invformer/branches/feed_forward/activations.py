"""Activations φ, their derivatives, and the constants that bounds need of them."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["silu", "gelu", "relu", "tanh"]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}
MODULES = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}
# The same, written over their argument: new memory costs more than the function.
IN_PLACE = {name: getattr(torch.ops.aten, f"{name}_") for name in ACTIVATIONS}
# sup |φ′|, rounded up. GELU attains 1.12890414… at √2, SiLU 1.09983932… at 2.39935… (1.12 and 1.1
# are in circulation; the first is too small).
ACTIVATION_SLOPE = {"relu": 1.0, "tanh": 1.0, "gelu": 1.1289042, "silu": 1.0998394}


def activation_slope(activation: Activation, h: Tensor) -> Tensor:
    """φ′(h), entry by entry."""
    match activation:
        case "silu":
            return torch.ops.aten.silu_backward(h.new_ones(1), h)
        case "gelu":
            density = torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)
            return torch.special.ndtr(h) + h * density
        case "relu":
            return (h > 0).to(h.dtype)
        case "tanh":
            return torch.cosh(h).square().reciprocal()  # 1 − tanh² loses what is small
