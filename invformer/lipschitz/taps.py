"""Where submodules begin and end in the graph of one pass of a model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from invformer.lipschitz.calls import called_with, first_real, is_real, leaves, mapped
from invformer.lipschitz.double_backward import pulling

SIMPLE = Tensor | int | float | str | None


@dataclass
class Tap:
    """A submodule's input and output in the graph."""

    input: GradientEdge
    output: GradientEdge
    input_shape: torch.Size
    output_shape: torch.Size
    parent: str | None  # the submodule around it


# A submodule that runs: its name, its x if this call counts, the grad mode before it, and x's edge.
_Entered = tuple[str, Tensor | None, bool, GradientEdge | None]


class Taps:
    """Hooks on submodules that record their first calls in one pass of a model.

    Tensors with a gradient enter such a submodule through a gate. While one level of nesting is
    differentiated its gates are closed: a backward pass ends there, so products of one submodule
    do not reach another, and all of a level share a pass.

    Attributes:
        levels: submodules by how many measured ones contain them.
    """

    def __init__(self, names: dict[nn.Module, str], model: nn.Module, inputs: Any) -> None:
        self.names = names
        self.levels: dict[int, dict[str, Tap]] = {}
        # Gates know no more of this object than that: they are in the graph that levels hold.
        self.closed: set[int] = set()
        self._seen: set[nn.Module] = set()
        self._inside: list[_Entered] = []
        self._depth = 0
        hooks = []
        for module in names:
            hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            called_with(model, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def products(
        self, level: int, a: Mapping[str, Tensor], create_graph: bool = False
    ) -> dict[str, Tensor | None]:
        """Jᵀa of submodules of one level, in one backward pass; None where J is zero."""
        self.closed.clear()
        self.closed.add(level)
        at = [self.levels[level][name] for name in a]
        with torch.enable_grad(), pulling():
            w = torch.autograd.grad(
                [tap.output for tap in at], [tap.input for tap in at], list(a.values()),
                retain_graph=True, create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
        return dict(zip(a, w, strict=True))

    def pair(
        self, level: int, stacks: list[list[str]], left: list[Tensor]
    ) -> tuple[list[Tensor], Callable[[Mapping[str, Tensor]], list[Tensor]]]:
        """Jᵀa for the stacked vectors a of submodules that are alike, and the map from x to Jx.

        Submodules that the map is not given an x of have zeros in the stacks that it returns.
        """
        with torch.enable_grad():
            left = [each.detach().requires_grad_() for each in left]
            w = self.products(level, named(stacks, left), create_graph=True)

        def push(right: Mapping[str, Tensor]) -> list[Tensor]:
            # What does not depend on its input, or not on a, has no product with J.
            pairs = [(w[name], x) for name, x in right.items()]
            on = [(y, x) for y, x in pairs if y is not None and y.requires_grad]
            if not on:
                return list(map(torch.zeros_like, left))
            images, vectors = zip(*on, strict=True)
            return list(
                torch.autograd.grad(
                    images, left, vectors, retain_graph=True, materialize_grads=True
                )
            )

        return self.stacked(level, stacks, left, w), push

    def stacked(
        self,
        level: int,
        stacks: list[list[str]],
        left: list[Tensor],
        w: Mapping[str, Tensor | None],
    ) -> list[Tensor]:
        """The products w = Jᵀa stacked as the vectors a are; zeros where J is zero."""
        at = self.levels[level]

        def pulled(name: str, a: Tensor) -> Tensor:
            found = w[name]
            return a.new_zeros(at[name].input_shape) if found is None else found.detach()

        return [
            torch.stack([pulled(name, a) for name in names])
            for names, a in zip(stacks, left, strict=True)
        ]

    def _enter(self, module: nn.Module, args: Any, named: Any) -> Any:
        mode, x, name = torch.is_grad_enabled(), None, self.names[module]
        if module not in self._seen:
            self._seen.add(module)
            given = (*args, *named.values())
            x = next((each for each in given if is_real(each)), None)
            if x is None or any(not isinstance(each, SIMPLE) for each in given):
                x = next(filter(is_real, leaves(given)), None)
        if x is None:
            self._inside.append((name, None, mode, None))
            return None
        torch.set_grad_enabled(True)  # a frozen part of a model is measured, too
        gates: dict[int, Tensor] = {}
        depth = self._depth

        def gated(leaf: Any) -> Any:
            if leaf is not x and not (is_real(leaf) and leaf.requires_grad):
                return leaf
            if id(leaf) not in gates:
                source = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                gates[id(leaf)] = Gate.apply(source, self.closed, depth)
            return gates[id(leaf)]

        def entered(argument: Any) -> Any:
            if isinstance(argument, SIMPLE):
                return gated(argument)
            if any(is_real(leaf) for leaf in leaves(argument)):
                return mapped(argument, gated)
            return argument  # the same object, which the submodule may fill

        new = tuple(map(entered, args)), {key: entered(each) for key, each in named.items()}
        edge = get_gradient_edge(gates[id(x)])
        self._inside.append((name, x, mode, edge))
        self._depth += 1
        return new

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, x, mode, edge = self._inside.pop()
        if x is None or edge is None:
            return
        torch.set_grad_enabled(mode)
        self._depth -= 1
        y = first_real(output)
        if y is not None and y.requires_grad:
            around = [outer for outer, entered, *_ in self._inside if entered is not None]
            tap = Tap(edge, get_gradient_edge(y), x.shape, y.shape, around[-1] if around else None)
            self.levels.setdefault(self._depth, {})[name] = tap


def named(names: list[list[str]], stacks: Iterable[Tensor]) -> dict[str, Tensor]:
    """What is stacked, by its names."""
    return {
        name: x
        for some, stacked in zip(names, stacks, strict=True)
        for name, x in zip(some, stacked, strict=True)
    }


class Gate(torch.autograd.Function):
    """The identity, whose backward pass ends here while its level is closed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, closed: set[int], level: int) -> Tensor:
        """A copy, which the submodule may overwrite."""
        ctx.closed, ctx.level = closed, level
        ctx.set_materialize_grads(False)  # zeros would run through the whole model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:  # type: ignore[override]
        """The gradient, or nothing."""
        return (None if ctx.level in ctx.closed else g), None, None
