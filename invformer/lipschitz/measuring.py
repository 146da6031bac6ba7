"""Run other people's models twice differentiably, and leave no trace in them."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from invformer.kernels.attention import only
from invformer.nn.transformer import evaluating
from invformer.numerics.precision import changed, without_autocast


class Unchecked:
    """Stands in for reentrant activation checkpoints, which autograd cannot derive twice."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """The checkpointed function itself."""
        return function(*args)


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and twice differentiable inside; afterwards everything is as before.

    Fused attention has no second derivative, and the fast path of PyTorch's encoders calls no
    submodules. A compiled module that is called in another way than training calls it would be
    compiled anew, and training might change with it.
    """
    device = next(model.parameters(), torch.empty(0)).device
    mha, set_class = torch.backends.mha, partial(setattr, checkpoint, "CheckpointFunction")
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        untouched(model),
        evaluating(model),
        without_autocast(device),
        only("math"),
        changed(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
        changed(lambda: checkpoint.CheckpointFunction, set_class, Unchecked),
        sdpa_kernel(SDPBackend.MATH),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Random numbers, buffers and plain attributes as before, whatever runs inside.

    The model works on copies of its buffers inside: writing their values back would tell autograd
    that they have changed. Lists and other objects that attributes refer to are not copied.
    """
    devices = {parameter.device for parameter in model.parameters()}
    cuda = sorted({device.index for device in devices if device.type == "cuda"})
    modules = list(dict.fromkeys(model.modules()))
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(module.named_buffers(recurse=False)) for module in modules]
    copies = {id(buffer): buffer.clone() for held in buffers for buffer in held.values()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cuda))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        try:
            for module, held in zip(modules, buffers, strict=True):
                for name, buffer in held.items():
                    setattr(module, name, copies[id(buffer)])
            yield
        finally:
            for module, held, before in zip(modules, buffers, attributes, strict=True):
                for name, buffer in held.items():
                    setattr(module, name, buffer)
                for name in vars(module).keys() - before.keys():
                    delattr(module, name)
                vars(module).update(before)
