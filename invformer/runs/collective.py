"""Numbers that the processes of a run exchange in every step, without waiting for their devices.

Lightning's ``strategy.reduce`` begins with a barrier, which waits for all work of a GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Numbers of the host travel between hosts, tensors of a GPU between GPUs.
GPU_BACKENDS = "cpu:gloo,cuda:nccl"


def backends(device: torch.device) -> str | None:
    """The backend for processes that use such a device; None is PyTorch's choice."""
    return GPU_BACKENDS if device.type == "cuda" else None


def largest_of_processes(number: int) -> int:
    """The largest number that any process holds; waits for the other hosts but not for devices."""
    if not dist.is_initialized():
        return number
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        held = torch.tensor(number)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


class Agreement:
    """The largest number that any process held at the call before, without waiting for it."""

    def __init__(self) -> None:
        self._asked: tuple[Any, Tensor] | None = None

    def ask(self, number: int) -> int:
        """Tell the others a number, and return what was agreed at the last call; 0 at first."""
        before = self._asked
        with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
            held = torch.tensor(number)
            self._asked = dist.all_reduce(held, op=dist.ReduceOp.MAX, async_op=True), held
        if before is None:
            return 0
        work, held = before
        work.wait()
        return int(held)


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes, without waiting for the devices."""
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        total = value.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()
