"""What the host may look at without waiting for the device, and what it can compile."""

import torch
from torch import Tensor


def has_answer_at_hand(number: Tensor) -> bool:
    """Whether looking at a number makes nobody wait."""
    return number.device.type == "cpu"


def compiler_complaint(device: torch.device) -> str | None:
    """What torch.compile misses for this device, such as a C++ compiler; None if it works.

    Asked of torch itself, by one small function: what it needs differs from device to device.
    """
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of several private classes, none of them common to all
        return str(error).partition("\n")[0]
    return None
