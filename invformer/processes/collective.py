"""Numbers that the processes of a run exchange in every step, without waiting for their devices.

Lightning's ``strategy.reduce`` begins with a barrier, which waits for all work of a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ask_for_largest(number: int) -> Callable[[], int]:
    """Ask all processes for the largest number that any of them holds.

    Returns:
        The answer, when it is called; it waits for the other hosts but not for devices.
    """
    with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
        held = torch.tensor(number)
        work: Any = dist.all_reduce(held, op=dist.ReduceOp.MAX, async_op=True)

    def answer() -> int:
        work.wait()
        return int(held)

    return answer


def largest_of_processes(number: int) -> int:
    """The largest number that any process holds, which all of them wait for."""
    return ask_for_largest(number)() if dist.is_initialized() else number


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes, without waiting for the devices."""
    if not dist.is_initialized():
        return value
    with torch.inference_mode(False):  # see above
        total = value.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()
