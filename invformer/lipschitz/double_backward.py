"""Layer norm and GELU with a cheap double backward, for products Jx of other people's models.

Jx is the derivative of the pull a ↦ Jᵀa (``create_graph``). PyTorch derives the backward pass of a
layer norm by forty operations, and computes the slope of GELU anew for every product. Our pulls are
only derived by a, in which they are linear, so here they are two fused kernels and a product with a
slope that is computed once. A model that derives itself gets PyTorch's.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from invformer.numerics.precision import changed

layer_norm, gelu = F.layer_norm, F.gelu
ONLY_INPUT = [True, False, False]


class Pull:
    """Whether the backward pass that runs is one of ours."""

    is_ours = False


@contextmanager
def pulling() -> Iterator[None]:
    """Backward passes inside are only derived by the vectors that they start from."""
    ours = partial(getattr, Pull, "is_ours"), partial(setattr, Pull, "is_ours")
    with changed(*ours, True):
        yield


def layer_norm_of(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As ``F.layer_norm``, in the place of which models call it."""
    others = [t for t in (weight, bias) if t is not None]
    if is_derived(input) and all(t.is_leaf and t.dtype == input.dtype for t in others):
        with suppress(RuntimeError):  # a vmap, or a derivative in forward mode
            return LayerNorm.apply(input, tuple(normalized_shape), weight, bias, eps)
    return layer_norm(input, normalized_shape, weight, bias, eps)


def gelu_of(input: Tensor, *, approximate: str = "none") -> Tensor:
    """As ``F.gelu``, in the place of which models call it."""
    if is_derived(input):
        with suppress(RuntimeError):
            return Gelu.apply(input, approximate)
    return gelu(input, approximate=approximate)


def is_derived(x: Any) -> bool:
    """True for an ordinary tensor that is derived by."""
    return type(x) is Tensor and x.requires_grad and torch.is_grad_enabled()


class LayerNorm(torch.autograd.Function):
    """γ x̂ + β."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        """As PyTorch computes it."""
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:  # type: ignore[override]
        """Jᵀg = A γ g, with A = (1 − 11ᵀ/n − x̂ x̂ᵀ/n) / √(variance + ε) of every row."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        if g is None:
            return None, None, None, None, None
        if Pull.is_ours:
            return LayerNormPull.apply(g, x, ctx.shape, mean, rstd, weight), None, None, None, None
        needed = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        at = g, x, ctx.shape, mean, rstd, weight, bias, needed
        found = torch.ops.aten.native_layer_norm_backward(*at)
        dx, dweight, dbias = (d if need else None for d, need in zip(found, needed, strict=True))
        return dx, None, dweight, dbias, None


class LayerNormPull(torch.autograd.Function):
    """g ↦ A γ g."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Any
    ) -> Tensor:
        """A γ g."""
        ctx.shape = shape
        ctx.save_for_backward(x, mean, rstd, weight)
        at = g, x, shape, mean, rstd, weight, None, ONLY_INPUT
        return torch.ops.aten.native_layer_norm_backward(*at)[0]

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> Any:  # type: ignore[override]
        """γ A h."""
        x, mean, rstd, weight = ctx.saved_tensors
        at = h, x, ctx.shape, mean, rstd, None, None, ONLY_INPUT
        image = torch.ops.aten.native_layer_norm_backward(*at)[0]
        return (image if weight is None else image * weight), None, None, None, None, None


class Gelu(torch.autograd.Function):
    """x Φ(x), or the same by tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """As PyTorch computes it."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.approximate, ctx.slope = approximate, None
        return gelu(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:  # type: ignore[override]
        """φ′(x) g."""
        (x,) = ctx.saved_tensors
        if g is None:
            return None, None
        backward = partial(torch.ops.aten.gelu_backward, approximate=ctx.approximate)
        if not Pull.is_ours:
            return backward(g, x), None
        if ctx.slope is None:
            with torch.no_grad():
                ctx.slope = backward(torch.ones_like(x), x)
        return g * ctx.slope, None
