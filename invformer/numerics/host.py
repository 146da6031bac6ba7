"""When the host may look at a number without waiting for the device."""

from torch import Tensor


def has_answer_at_hand(number: Tensor) -> bool:
    """Whether looking at a number makes nobody wait."""
    return number.device.type == "cpu"
