"""Estimates for all branches of a stack by one call of compiled code.

``kernels/cpp/estimate.cpp`` says how. It takes the place of a hundred operations on small tensors.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches.dot_product.attention import DotProductAttention
from invformer.branches.feed_forward.feed_forward import (
    ACTIVATIONS,
    MODULES,
    Activation,
    FeedForward,
)
from invformer.branches.tied_l2.kim import L2Attention
from invformer.kernels import native
from invformer.lipschitz.jacobians import (
    STACKED,
    StackedBoundedAttention,
    StackedL2Attention,
    stacked_class,
)
from invformer.lipschitz.power_iteration import TOKENS_AT_ONCE, PowerIteration
from invformer.nn.certificate import original_class
from invformer.nn.coupling import CouplingBlock
from invformer.nn.residual import InvertibleBlock, InvertibleResidual, ResidualWeights
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import PreNormBlock, PreNormBranch, PreNormStack
from invformer.weights.dropout import Dropout
from invformer.weights.position_bias import CausalMask, RelativePositionBias, VisibilityMask

# Of one branch, by the names of ``_Branch``: tensors of one format, all but W and V without gaps.
Fields = dict[str, Tensor | float]

MASKS = (CausalMask, RelativePositionBias)
FORMATS = (torch.float32, torch.float64)
# The compiled code has numbers for activations.
ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
BLOCKS = (InvertibleBlock, PreNormBlock, CouplingBlock)
# What may follow the LayerNorm of a baseline, and its parameters but for position biases.
BASELINES = {
    DotProductAttention: {"qkv.weight", "out.weight"},
    L2Attention: {"w_q", "w_v", "w_o"},
    FeedForward: {"0.weight", "0.bias", "2.weight", "2.bias"},
}
PARTS = (*BASELINES, *MASKS, *MODULES.values(), PreNormBranch, nn.LayerNorm, nn.Linear, Dropout)
# What a branch consists of, in the order of ``Branch`` in branch.h, which explains it.
TENSORS = (
    *("w", "b", "v", "c", "scale", "shift", "inverse", "log_scale", "norm_scale", "norm_shift"),
    *("biases", "temperatures", "left", "lengths", "estimate", "turn"),
)
NUMBERS = (
    *("w_row", "w_column", "v_row", "v_column", "inner", "outer", "kernel", "activation", "heads"),
    *("bias_stride", "is_tied", "strictly_causal", "at_once", "reads", "writes"),
)


class _Branch(ctypes.Structure):
    """A residual layer, the scaling that follows it, and the vectors of its iteration."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        *((name, ctypes.c_double) for name in ("radius", "epsilon")),
    ]


class _Call(ctypes.Structure):
    """Sizes and options of a call, for all branches."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sequences", "tokens", "width")),
        *((name, ctypes.c_int64) for name in ("streams", "branches", "steps")),
        ("diagonal", ctypes.c_bool),
        ("entries", ctypes.c_bool),
        ("threads", ctypes.c_int),
    ]


def can_take(
    blocks: Sequence[Any], branches: Sequence[Any], iterations: Sequence[PowerIteration]
) -> bool:
    """True if there is compiled code for these blocks, and for these iterations on their branches.

    ``branches`` are the layers themselves in a baseline.
    """
    inner = [getattr(branch, "inner", branch) for branch in branches]
    masks = [branch.position for branch in inner if hasattr(branch, "position")]
    return (
        all(original_class(block) in BLOCKS for block in blocks)
        and all(is_plain(f) or stacked_class(f) in STACKED.values() for f in branches)
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


def is_plain(branch: nn.Module) -> bool:
    """True for a branch of a baseline with nothing in it but what the library builds."""
    if type(branch) is not PreNormBranch or type(branch.inner) not in BASELINES:
        return False
    names = {name for name, _ in branch.inner.named_parameters() if "position" not in name}
    return (
        all(type(module) in PARTS for module in branch.modules())
        and names == BASELINES[type(branch.inner)]
        and branch.norm.bias is not None
        and branch.norm.eps > 0
    )


def estimates(
    stack: InvertibleStack | PreNormStack,
    weights: StackWeights | None,
    x: Float[Tensor, "sequences tokens channels"],
    iterations: Sequence[PowerIteration],
    num_steps: int,
    diagonal: bool,
    threads: int,
) -> Float[Tensor, "branches"]:
    """The largest gain of every branch after some steps; the iterations go on from there.

    ``iterations`` are of the attentions and of the feed-forwards, x is the input of the stack. A
    baseline has no ``weights``. ``diagonal`` means only the diagonal blocks ∂f_i/∂x_i. It takes
    ``threads`` at most.
    """
    branches = of_baseline(stack) if weights is None else of_invertible(stack, weights)
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
    width = iterations[0].left.shape[-1]
    sizes = *x.shape[:-1], width, x.shape[-1] // width, len(each)
    call = _Call(*sizes, num_steps, diagonal, entries, min(threads, len(each)))
    native.call("advance", x.dtype, (_Branch * len(each))(*each), native.pointer(x), call)
    for iteration in iterations:
        iteration.turn_by(num_steps)
    return values


def of_invertible(stack: Any, weights: StackWeights) -> list[Fields]:
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
    own: Fields = maps(w, v) | {"radius": layer.input_radius or 0.0}
    if weights.centre is not None and layer.scaling is not None:  # D is folded in
        own |= {"shift": weights.centre, "log_scale": layer.scaling.log_scale}
    elif weights.scaling is not None:
        scaling = weights.scaling
        own |= {"scale": scaling.scale, "inverse": scaling.inverse, "shift": scaling.shift}
    if biases:
        return own | hidden_units(branch.activation, biases[0], weights.branch.kernel)
    own |= heads(len(weights.branch.g), branch.position)
    if stacked is StackedBoundedAttention:
        temperatures = weights.branch.temperature
        return own | {"temperatures": temperatures, "strictly_causal": branch.strictly_causal}
    return own | {"is_tied": True}


def of_baseline(stack: Any) -> list[Fields]:
    """Both branches of every block: LayerNorm, maps, and what is between the maps."""
    found: list[Fields] = []
    attentions = [block.attention.inner for block in stack.blocks]
    tied = isinstance(attentions[0], L2Attention)
    weights = L2Attention.weights_of(attentions) if tied else attentions
    for block, of_attention in zip(stack.blocks, weights, strict=True):
        for layer in (block.attention, block.feed_forward):
            inner, norm = layer.inner, layer.norm
            own: Fields = {"scale": norm.weight, "shift": norm.bias, "epsilon": norm.eps}
            if isinstance(inner, FeedForward):
                first, last = cast(nn.Linear, inner[0]), cast(nn.Linear, inner[2])
                own |= maps(first.weight.T, last.weight.T) | {"c": last.bias}
                own |= hidden_units(inner.activation, first.bias, inner.kernel)
            elif tied:
                own |= maps(*StackedL2Attention.maps(of_attention)) | {"is_tied": True}
                own |= heads(len(of_attention.g), inner.position)
            else:
                own |= maps(inner.qkv.weight.T, inner.out.weight.T)
                own |= heads(inner.num_heads, inner.position)
            if isinstance(block, CouplingBlock):  # attention adds to the first stream
                other = "reads" if layer is block.attention else "writes"
                own[other] = len(norm.weight)
            found.append(own)
    return found


def maps(w: Tensor, v: Tensor) -> Fields:
    """W and V, as they lie in memory."""
    own: Fields = {"w": w, "v": v, "inner": w.shape[-1], "outer": len(v)}
    own |= {"w_row": w.stride(0), "w_column": w.stride(1)}
    return own | {"v_row": v.stride(0), "v_column": v.stride(1)}


def hidden_units(activation: Activation, b: Tensor, kernel: int) -> Fields:
    """What a feed-forward computes between its maps."""
    return {"b": b, "activation": ACTIVATION_NUMBERS[activation], "kernel": kernel}


def heads(count: int, position: VisibilityMask) -> Fields:
    """What the heads of an attention see of positions."""
    own: Fields = {"heads": count, "kernel": 1}
    if isinstance(position, RelativePositionBias):
        table = position.table
        own |= {"biases": table, "bias_stride": table.stride(0) if len(table) > 1 else 0}
    return own
