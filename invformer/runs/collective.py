"""What the processes of a run tell each other in every step, without waiting for their devices.

Lightning's ``strategy.reduce`` puts a barrier first, which on GPUs waits for all that was started.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Numbers of the host travel between hosts, tensors of a GPU between GPUs.
GPU_BACKENDS = "cpu:gloo,cuda:nccl"


def backends(device: torch.device) -> str | None:
    """What processes whose work is done on such devices talk through; None leaves it to them."""
    return GPU_BACKENDS if device.type == "cuda" else None


def largest_of_processes(number: int) -> int:
    """The largest number that any process holds: waits for the other hosts, and no device."""
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        held = torch.tensor(number)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes, in the devices' own time."""
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
