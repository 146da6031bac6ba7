"""Numbers that the processes of a run exchange in every step, without waiting for their devices.

Lightning's ``strategy.reduce`` begins with a barrier, which waits for all work of a GPU.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def largest_of_processes(number: int) -> int:
    """The largest number that any process holds, for which all of them wait."""
    if not dist.is_initialized():
        return number
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        held = torch.tensor(number)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes, without waiting for the devices."""
    if not dist.is_initialized():
        return value
    with torch.inference_mode(False):  # see above
        total = value.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()
