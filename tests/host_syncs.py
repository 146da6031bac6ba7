"""What makes the host wait for the device, or copies from it into the device's stream."""

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
# What torch.tensor and new_tensor end with: Python numbers, in memory that is not pinned.
COPIES = ("aten::lift_fresh",)


class HostSyncs(TorchDispatchMode):
    """Counts operations whose value the host has to wait for, and tensors made of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in WAITS + COPIES:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))
