"""CUDA graphs on a processor: a graph's operations are noted, and done again on the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class NotedGraph:
    """Operations with the tensors that they read and wrote while they were noted."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        """Do all of it again; what was returned then gets the new values."""
        for func, args, kwargs, results in self.notes:
            found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for held, value in zip(results, found, strict=True):
                if held.data_ptr() != value.data_ptr():  # neither in place nor a view
                    held.copy_(value)


class Noting(TorchDispatchMode):
    """Notes every operation inside in a graph; what they change in place is put back at the end."""

    def __init__(self, graph: NotedGraph, **_: Any) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[Tensor, Tensor]] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(t, t.clone()) for t in tree_leaves(value)]
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # A graph knows addresses, not tensors, which may get other memory later.
        noted = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, tensors))
        self.graph.notes.append((func, *noted))
        return result


@contextmanager
def noted_graphs() -> Iterator[None]:
    """What PyTorch calls CUDA graphs are notes inside."""
    with (
        patch("gc.collect", lambda: 0),  # for CUDA alone, and slow in a process that tests
        patch("torch.cuda.CUDAGraph", NotedGraph),
        patch("torch.cuda.graph", Noting),
        patch("torch.cuda.graphs.graph_pool_handle", lambda: None),
        patch("torch.cuda.synchronize", lambda: None),
        patch("torch.cuda.Stream", lambda: None),
        patch("torch.cuda.stream", lambda _: nullcontext()),
        patch("torch.cuda.current_stream", Mock()),
    ):
        yield
