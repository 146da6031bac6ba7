"""What makes the host wait for the device, or copies from it into the device's stream."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal",
    "aten::masked_select", "aten::_unique2",
}  # fmt: skip
# Indices that are masks are searched for what is true.
INDEXED = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# What torch.tensor and new_tensor end with: Python numbers, in memory that is not pinned.
COPIES = {"aten::lift_fresh"}
# A processor does these without any operation.
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


class HostSyncs(TorchDispatchMode):
    """Counts operations whose value the host has to wait for, and tensors made of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        masked = name in INDEXED and any(t is not None and t.dtype == torch.bool for t in args[1])
        if masked or name in WAITS | COPIES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Counts what reads a tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(device: torch.device | str = "cpu") -> Iterator[list[str]]:
    """The names of all that waits, complete at the end; on a GPU CUDA itself says so."""
    found: list[str] = []
    if torch.device(device).type != "cuda":
        with HostSyncs() as syncs, HostReads() as reads:
            yield found
        found += syncs.found + reads.found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if "called a sync" in str(w.message)]
