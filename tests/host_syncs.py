"""What makes the host wait for the device."""

from torch.utils._python_dispatch import TorchDispatchMode


class HostSyncs(TorchDispatchMode):
    """Counts operations whose value the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))
