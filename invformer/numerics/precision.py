"""Floating-point formats: unit roundoff, residual floors, autocast, denormal numbers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Smallest relative residual ‖y − x − f(x)‖ / ‖y‖ that Transformer blocks were seen to reach, by the
# format the iterates are stored in. Asking for less never ends.
RESIDUAL_FLOOR = {
    torch.float64: 1e-15,
    torch.float32: 5e-7,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}

# Formats of the forward pass, by Lightning's names for precisions.
FORWARD_DTYPE = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "64-true": torch.float64}


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Operations in the formats of their arguments, also under autocast; nothing where it is off.

    Entering ``torch.autocast`` costs as much as several operations on a token. The meta device has
    no autocast.
    """
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def has_autocast(device: torch.device) -> bool:
    """True if operations on a device run under autocast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def at_least_single(x: Tensor) -> Tensor:
    """x in float32, or as it is if that is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of one rounding: half the gap between 1 and its successor."""
    return torch.finfo(dtype).eps / 2


@contextmanager
def changed(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """One of PyTorch's global settings with another value inside, and then as before."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def denormals_flushed() -> AbstractContextManager[None]:
    """Treat denormal numbers as zero in this thread, where the CPU can, and then as before.

    Arithmetic with them is a hundred times as slow. Steep position biases make many, and so do the
    first steps of training, where activations run through several orders of magnitude. Threads that
    PyTorch starts inside do the same, for as long as they live.
    """
    smallest = 5e-324
    return changed(lambda: smallest * 1.0 == 0.0, torch.set_flush_denormal, True)


def is_denormal(x: Tensor) -> Tensor:
    """Which entries are denormal, so that a processor may read them as zero; by their bits."""
    bits = Bits.apply(x.detach().contiguous())
    magnitude = bits & torch.iinfo(bits.dtype).max
    smallest_normal = round(1 / torch.finfo(x.dtype).eps)  # as bits: above all of the mantissa
    return (magnitude > 0) & (magnitude < smallest_normal)


class Bits(torch.autograd.Function):
    """Floating-point numbers as integers; before torch 2.13 ``vmap`` has no rule for it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Read the bits as integers."""
        return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Tensor) -> tuple[Tensor, Any]:
        """One call for the batch."""
        return Bits.apply(*args), in_dims[0]
