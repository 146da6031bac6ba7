"""What undoing a chain of invertible layers gives, with implicit gradients.

For x + f(x) = y and a cotangent v = ∂L/∂x, the implicit function theorem gives

    (I + ∂f/∂x)ᵀ w = v,    ∂L/∂y = w,    ∂L/∂θ = −(∂f/∂θ)ᵀ w.

The solver's steps are not differentiated: memory depends neither on their number nor on depth,
since the backward pass starts from the lowest input and computes the next one again at every layer.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.fixed_point_solution import FixedPointError, FixedPointSolution
from invformer.numerics.norms import Tokens
from invformer.numerics.private import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class StackSolution:
    """The input of a stack found from its output, layer by layer.

    Attributes:
        value: the recovered input, (*batch, N, D); it carries gradients.
        error_bound: bound on the distance of ``value`` from the input that was pushed up, forward
            rounding included (by the rounding model of docs/numerics.md; not that of autocast), in
            the stack's norm, per sample; inf where nothing is proven.
        layers: the fixed-point solution of every residual layer, from the top down, without
            gradients.
    """

    value: Tensor
    error_bound: Float[Tensor, "*batch"]
    layers: dict[str, FixedPointSolution]


def with_gradients(x: Tokens, y: Tokens, layers: list[tuple[Any, Any, dict[str, Any]]]) -> Tokens:
    """The solution x of G_L(… G_1(x)) = y, with gradients of y, of weights and of parameters.

    ``layers`` are G_1, G_2, …, with their weights and options. ``G.transposed(x, weights, v,
    **options)`` gives G(x), recorded for gradients, and the w with (∂G/∂x)ᵀ w = v; it uses its
    weights and ``G.parameters()``. Second derivatives are refused.
    """
    if not torch.is_grad_enabled():
        return x
    inputs: list[Any] = []
    parts: list[tuple[Any, Any, int, dict[str, Any]]] = []
    for layer, weights, options in layers:
        leaves, spec = tree_flatten(weights)
        parts.append((layer, spec, len(leaves), options))
        inputs += [*leaves, *layer.parameters()]
    if not any(map(needs_gradient, (y, *inputs))):
        return x
    return _Undone.apply(x, y, parts, *inputs)  # pyright: ignore[reportReturnType]


class _Undone(torch.autograd.Function):
    """The identity of x, with the gradients of the inverse of some layers at y."""

    @staticmethod
    def forward(ctx: Any, x: Tokens, y: Tokens, parts: Any, *inputs: Any) -> Tokens:
        """``parts``: of each layer the structure and number of its weights, and the options."""
        ctx.save_for_backward(x, *inputs)  # also notes if they are changed before backward
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """From the lowest layer up, each layer's output again, and w in place of v."""
        if torch.is_grad_enabled():
            raise RuntimeError("an inverse has no second derivatives: call without create_graph")
        (v,), (x, *inputs) = cotangents, ctx.saved_tensors
        gradients: list[Tensor | None] = []
        for layer, spec, count, options in ctx.parts:
            weights = [
                w.detach().requires_grad_() if needs_gradient(w) else w for w in inputs[:count]
            ]
            own = [*weights, *layer.parameters()]
            inputs = inputs[len(own) :]
            wanted = [t for t in own if needs_gradient(t)]
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y, v = layer.transposed(x, tree_unflatten(weights, spec), v, **options)
                found = torch.autograd.grad(y, wanted, -v, allow_unused=True) if wanted else ()
            by_tensor = dict(zip(map(id, wanted), found, strict=True))
            gradients += [by_tensor.get(id(t)) for t in own]
            x = y.detach()
        return None, v, None, *gradients


def needs_gradient(leaf: Tensor | None) -> bool:
    """True for a tensor that requires gradients; the weights of a layer may have none for D."""
    return leaf is not None and leaf.requires_grad


def warn_of_failures(solution: FixedPointSolution) -> None:
    """Warn, as nobody sees the status of a backward pass."""
    if not bool(solution.converged.all()):
        warnings.warn(f"wrong gradients: {FixedPointError(solution)}", stacklevel=2)
