"""Numbers that the processes of a run exchange in every step, without waiting for their devices.

Lightning's ``strategy.reduce`` begins with a barrier, which waits for all work of a GPU.
"""

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
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        held = torch.tensor(number)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes, without waiting for the devices."""
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
