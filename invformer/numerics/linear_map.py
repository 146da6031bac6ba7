"""The Jacobian of a map at a point, as a pair of products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from invformer.numerics.norms import Tokens

SequenceMap = Callable[[Tokens], Tokens]


@dataclass(frozen=True)
class LinearMap:
    """J = ∂f/∂X at a fixed X, (*batch, N, D), with f(X); J acts on each sample separately."""

    jvp: Callable[[Tensor], Tensor]  # dX ↦ J dX
    vjp: Callable[[Tensor], Tensor]  # G ↦ Jᵀ G
    value: Tensor  # f(X)


def linearise(f: SequenceMap, x: Tokens) -> LinearMap:
    """J = ∂f/∂X at X for any composition of twice differentiable operations.

    JᵀG is reverse mode; G ↦ JᵀG is linear with adjoint J, so J dX is its reverse mode in turn. Both
    graphs are built once and reused: every product costs about one backward pass and needs no
    forward-mode rule. Works under ``no_grad`` and in inference mode. f must not mix samples or
    update buffers. Fused attention has no second derivative: run it as ``with only("math"):``.
    """
    with torch.inference_mode(False):
        # Inference tensors cannot be saved for backward; a clone made here is an ordinary tensor.
        y, pull_back = torch.func.vjp(f, x.detach().clone())[:2]
        push_forward = torch.func.vjp(lambda g: pull_back(g)[0], torch.zeros_like(y))[1]

    def product(transposed_map: Callable, vector: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return transposed_map(vector.detach().clone())[0].detach()

    return LinearMap(
        jvp=lambda dx: product(push_forward, dx),
        vjp=lambda g: product(pull_back, g),
        value=y.detach(),
    )
