"""How many kernels a piece of code would launch: operations that are not mere views."""

from torch.utils._python_dispatch import TorchDispatchMode

# fmt: off
VIEWS = {
    "alias", "as_strided", "broadcast_to", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "flatten", "mT", "movedim", "new_empty", "permute", "promote_types",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unflatten", "unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}
# fmt: on


class Launches(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.split("::")[-1] not in VIEWS
        return func(*args, **(kwargs or {}))
