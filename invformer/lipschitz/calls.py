"""A call of a submodule, whatever it takes and returns, as a map from one tensor to another."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from invformer.lipschitz.double_backward import pulling
from invformer.numerics.linear_map import LinearMap


class Call:
    """A submodule f with copies of the arguments of one call, as a function of its first tensor x.

    Attributes:
        x: the first floating-point tensor among the arguments; None if there is none.
        output_shape: of f(x), after it was computed once.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.module = module
        self.given = duplicate((args, dict(named)))
        self.x = next(filter(is_real, leaves(self.given)), None)
        self.output_shape = torch.Size()

    @property
    def row(self) -> Tensor:
        """x as a row, (1, size of x)."""
        assert self.x is not None
        return self.x.reshape(1, -1)

    def on_row(self, row: Tensor) -> Tensor:
        """f(x) as a row for another x; the other arguments keep their values."""
        assert self.x is not None
        here = row.view(self.x.shape).clone()  # which the module may overwrite
        args, named = mapped(
            self.given,
            lambda leaf: (
                here if leaf is self.x else leaf if isinstance(leaf, Tensor) else copied(leaf)
            ),
        )
        y = first_real(self.module(*args, **named))
        assert y is not None
        self.output_shape = y.shape
        return y.reshape(1, -1)

    def jacobian(self) -> LinearMap:
        """∂f/∂x by autograd, which unlike ``torch.func`` derives checkpointed modules, too."""
        with torch.inference_mode(False), torch.enable_grad():
            x = self.row.clone().requires_grad_()
            y = self.on_row(x)
            g = torch.zeros_like(y, requires_grad=True)
            w = product(y, x, g, create_graph=True)
        return LinearMap(
            jvp=lambda v: product(w, g, v),
            vjp=lambda a: product(y, x, a),
            value=y.detach(),
        )


def product(y: Tensor, x: Tensor, a: Tensor, create_graph: bool = False) -> Tensor:
    """aᵀ ∂y/∂x, which is 0 if y does not depend on x."""
    if not y.requires_grad:
        return torch.zeros_like(x)
    with torch.inference_mode(False), pulling():
        return torch.autograd.grad(
            y, x, a.clone(), retain_graph=True, create_graph=create_graph, materialize_grads=True
        )[0]


def called_with(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """``model(**inputs)`` for a single dictionary, otherwise ``model(*inputs)``, with copies."""
    inputs = duplicate(inputs)
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return model(**inputs[0])
    return model(*inputs)


def first_real(output: Any) -> Tensor | None:
    """The first floating-point tensor of an output; a scalar only if there is nothing else."""
    if is_real(output):
        return output
    found = [leaf for leaf in leaves(output) if is_real(leaf)]
    return next((y for y in found if y.dim() > 0), found[0] if found else None)


def leaves(value: Any) -> list[Any]:
    """What stands in nested containers, in their order."""
    found: list[Any] = []

    def kept(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, kept)
    return found


def duplicate(value: Any) -> Any:
    """A copy of all that a module may overwrite; a tensor that stands twice is one copy."""
    copies: dict[int, Tensor] = {}

    def kept(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copies.setdefault(id(leaf), leaf.detach().clone())
        return copied(leaf)

    return mapped(value, kept)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists, dictionaries and dataclasses with every leaf changed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(new, each.name, mapped(getattr(value, each.name), change))
        return new
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(mapped(item, change) for item in value)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)([mapped(item, change) for item in value])
    return change(value)


def copied(leaf: Any) -> Any:
    """A copy of what a module may change, such as a cache; the thing itself if it has none."""
    if isinstance(leaf, nn.Module):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # other people's objects may raise anything
        return leaf


def is_real(x: Any) -> bool:
    """True if x is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def is_linear(call: Call) -> bool:
    """True for a ``nn.Linear`` as it is: its constant is ‖W‖₂ for all tokens together.

    Of one that is pruned, or normalised by a hook, a forward pass computes W.
    """
    return type(call.module) is nn.Linear and isinstance(call.module.weight, nn.Parameter)


def of_matrix(call: Call) -> LinearMap:
    """W of a ``nn.Linear``, in the place of the same map of all tokens."""
    matrix = call.module.get_parameter("weight").detach()
    zero = matrix.new_zeros(1, len(matrix))
    return LinearMap(jvp=lambda v: v @ matrix.mT, vjp=lambda a: a @ matrix, value=zero)
