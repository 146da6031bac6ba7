"""CUDA graphs: the launches of a computation, recorded once and then sent to the GPU as one.

A step of a small model is a thousand launches of a few microseconds each, more than a host can send
in the time that a GPU takes for them. What is recorded reads and writes the same memory each time,
and runs no Python.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from invformer.numerics.private import foreach_copy_, tree_flatten


class Replayed:
    """A function of tensors that is launched at its first call, then recorded, then replayed.

    Its arguments are containers of tensors, and no gradients pass through it. Parameters and
    whatever else it reads have to stay at their addresses. The first call loads libraries and
    kernels.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.was_launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        """The result. The next call overwrites it; later calls copy into the second's arguments."""
        if not self.was_launched:
            self.was_launched = True
            return self.function(*arguments)
        if self.graph is None:
            gc.collect()  # a graph that is freed while another is recorded spoils it
            self.graph, self.arguments = torch.cuda.CUDAGraph(), tensors_in(arguments)
            with torch.cuda.graph(self.graph):
                self.result = self.function(*arguments)
        pairs = zip(self.arguments, tensors_in(arguments), strict=True)
        if moved := [(held, given) for held, given in pairs if held is not given]:
            held, given = map(list, zip(*moved, strict=True))
            foreach_copy_(held, given)
        self.graph.replay()
        return self.result


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in containers of containers."""
    return [leaf for leaf in tree_flatten(x)[0] if isinstance(leaf, Tensor)]


class WithParameters(nn.Module):
    """A function as a module that owns the parameters it reads; runs under the present autocast.

    ``make_graphed_callables`` differentiates only the parameters of a module.
    """

    def __init__(self, function: Callable[..., Tensor], model: nn.Module) -> None:
        super().__init__()
        self.function, self.model = function, model
        self.autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")

    def forward(self, *inputs: Tensor) -> Tensor:
        """function(*inputs)."""
        dtype, enabled = self.autocast
        # A cast that autocast has cached would be recorded as a constant.
        with torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False):
            return self.function(*inputs)


def with_gradients(
    function: Callable[..., Tensor], model: nn.Module, *inputs: Tensor
) -> Callable[..., Tensor]:
    """A function of inputs of these shapes and of a model's parameters, with their gradients.

    The forward pass is one graph, under autocast as it is now, the backward pass another. Gradients
    are the graph's own memory, so that those of several backward passes do not add up.
    """
    gc.collect()
    # Gradients come from the stream that recorded and are added on another, as PyTorch would warn.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    module, graph = WithParameters(function, model), torch.cuda.make_graphed_callables
    with torch.autocast("cuda", enabled=False):  # as backward passes are launched
        return graph(module, inputs, allow_unused_input=True).forward  # type: ignore[attr-defined]
