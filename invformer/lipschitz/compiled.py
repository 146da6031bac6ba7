"""Estimates for all branches of a stack by one call of compiled code.

``kernels/cpp/estimate.cpp`` says how. It takes the place of a hundred operations on small tensors.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.kernels import native
from invformer.lipschitz.jacobians import STACKED, StackedBoundedAttention, stacked_class
from invformer.lipschitz.power_iteration import TOKENS_AT_ONCE, PowerIteration
from invformer.nn.feed_forward import ACTIVATIONS
from invformer.nn.position_bias import CausalMask, RelativePositionBias
from invformer.nn.residual import InvertibleResidual, ResidualWeights
from invformer.nn.stack import InvertibleStack, StackWeights

# Of one branch, by the names of ``_Branch``: tensors of one format, without gaps.
Fields = dict[str, Tensor | float]

MASKS = (CausalMask, RelativePositionBias)
FORMATS = (torch.float32, torch.float64)
# The compiled code has numbers for activations.
ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
# What a branch consists of, in the order of ``Branch`` in estimate.cpp, which explains it.
TENSORS = (
    *("w", "b", "v", "scale", "shift", "inverse", "log_scale", "norm_scale", "norm_shift"),
    *("biases", "temperatures", "left", "lengths", "estimate", "turn"),
)
NUMBERS = (
    *("inner", "outer", "kernel", "activation", "heads", "bias_stride"),
    *("strictly_causal", "at_once"),
)


class _Branch(ctypes.Structure):
    """A residual layer, the scaling that follows it, and the vectors of its iteration."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("radius", ctypes.c_double),
    ]


class _Call(ctypes.Structure):
    """Sizes and options of a call, for all branches."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("sequences", "tokens", "width", "branches", "steps")),
        ("diagonal", ctypes.c_bool),
        ("entries", ctypes.c_bool),
        ("threads", ctypes.c_int),
    ]


def can_take(branches: Sequence[Any], iterations: Sequence[PowerIteration]) -> bool:
    """True if there is compiled code for these branches, and for these iterations on them."""
    masks = [branch.position for branch in branches if hasattr(branch, "position")]
    return (
        all(stacked_class(branch) in STACKED.values() for branch in branches)
        and all(type(mask) in MASKS for mask in masks)
        and all(
            each.norm != "frobenius"
            and each.slots.shape[-1] <= TOKENS_AT_ONCE
            and each.left.device.type == "cpu"
            and each.left.dtype in FORMATS
            for each in iterations
        )
        and native.is_available()
    )


def estimates(
    stack: InvertibleStack,
    weights: StackWeights,
    x: Float[Tensor, "sequences tokens width"],
    iterations: Sequence[PowerIteration],
    num_steps: int,
    diagonal: bool,
    threads: int,
) -> Float[Tensor, "branches"]:
    """The largest gain of every branch after some steps; the iterations go on from there.

    ``iterations`` are of the attentions and of the feed-forwards, x is the input of the first
    branch. ``diagonal`` means only the diagonal blocks ∂f_i/∂x_i. It takes ``threads`` at most.
    """
    branches = branches_of(stack, weights)
    values = x.new_empty(len(branches))
    for first, iteration in enumerate(iterations):
        own = branches[first :: len(iterations)], values[first :: len(iterations)]
        vectors = zip(*own, iteration.left, iteration.lengths, strict=True)
        for branch, value, left, lengths in vectors:
            branch |= {"left": left, "lengths": lengths, "estimate": value}
            branch |= {"at_once": iteration.slots.shape[-1], "turn": iteration.turn}
    each = [
        _Branch(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in branch.items()})
        for branch in branches
    ]
    entries = iterations[0].norm == "entry_max"
    call = _Call(*x.shape, len(each), num_steps, diagonal, entries, min(threads, len(each)))
    native.call("advance", x.dtype, (_Branch * len(each))(*each), native.pointer(x), call)
    for iteration in iterations:
        iteration.turn_by(num_steps)
    return values


def branches_of(stack: InvertibleStack, weights: StackWeights) -> list[Fields]:
    """Every residual layer, with the ActivationNorm that follows it."""
    found: list[Fields] = []
    for name, layer in stack.layers():
        if isinstance(layer, InvertibleResidual):
            found.append(fields_of(layer, weights[name]))
        else:
            norm = weights[name]
            found[-1] |= {"norm_scale": norm.scale, "norm_shift": norm.shift}
    return found


def fields_of(layer: InvertibleResidual, weights: ResidualWeights) -> Fields:
    """Maps and scalings of a layer, and what its branch is."""
    branch: Any = layer.branch
    stacked: Any = stacked_class(branch)
    w, v, *biases = stacked.maps(weights.branch)
    own: Fields = {"w": w.contiguous(), "v": v.contiguous(), "inner": w.shape[-1], "outer": len(v)}
    own["radius"] = layer.input_radius or 0.0
    if weights.centre is not None and layer.scaling is not None:  # D is folded in
        own |= {"shift": weights.centre, "log_scale": layer.scaling.log_scale}
    elif weights.scaling is not None:
        scaling = weights.scaling
        own |= {"scale": scaling.scale, "inverse": scaling.inverse, "shift": scaling.shift}
    if biases:
        kernel, activation = weights.branch.kernel, ACTIVATION_NUMBERS[branch.activation]
        return own | {"b": biases[0], "kernel": kernel, "activation": activation}
    own |= {"heads": len(weights.branch.g), "kernel": 1}
    if isinstance(branch.position, RelativePositionBias):
        table = branch.position.table
        own |= {"biases": table, "bias_stride": table.stride(0) if len(table) > 1 else 0}
    if stacked is StackedBoundedAttention:
        own["temperatures"] = weights.branch.temperature
        own["strictly_causal"] = branch.strictly_causal
    return own
