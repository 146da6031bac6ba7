"""Run other people's models twice differentiably, and leave no trace in them."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from invformer.kernels.attention import only
from invformer.lipschitz.double_backward import gelu_of, layer_norm_of
from invformer.numerics.precision import changed, without_autocast
from invformer.numerics.private import BACKWARD_HOOKS

# How attributes are copied that a forward pass may change in place.
COPIES: dict[type, Callable[[Any], Any]] = {
    Tensor: Tensor.clone,
    torch.Generator: torch.Generator.clone_state,
    random.Random: deepcopy,
    **{kind: kind for kind in (list, dict, set, deque)},
}
# Attributes of modules while they are measured.
OFF = {"training": False, **{name: {} for name in BACKWARD_HOOKS}}


class Unchecked:
    """Stands in for reentrant activation checkpoints, which autograd cannot derive twice."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """The checkpointed function itself."""
        return function(*args)


def unchanged(*_: object) -> None:
    """Stands in for entering and leaving ``torch.autocast``."""


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and twice differentiable inside; afterwards everything is as before.

    Fused attention has no second derivative, and the fast path of PyTorch's encoders calls no
    submodules. A compiled module that is called in another way than training calls it would be
    compiled anew, and training might change with it.
    """
    device, autocast = next(model.parameters(), torch.empty(0)).device, torch.autocast
    mha, set_class = torch.backends.mha, partial(setattr, checkpoint, "CheckpointFunction")
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        untouched(model),
        without_autocast(device),
        # Nor does a module switch autocast on, as those that accelerate has prepared do.
        changed(lambda: autocast.__enter__, partial(setattr, autocast, "__enter__"), unchanged),
        changed(lambda: autocast.__exit__, partial(setattr, autocast, "__exit__"), unchanged),
        only("math"),
        changed(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
        changed(lambda: checkpoint.CheckpointFunction, set_class, Unchecked),
        sdpa_kernel(SDPBackend.MATH),
        torch.compiler.set_stance("force_eager"),
        changed(lambda: F.layer_norm, partial(setattr, F, "layer_norm"), layer_norm_of),
        changed(lambda: F.gelu, partial(setattr, F, "gelu"), gelu_of),
    ):
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """In eval mode; random numbers, buffers and plain attributes as before, whatever runs inside.

    The model works on copies inside: of its buffers, because writing their values back would tell
    autograd that they have changed, and of attributes that are tensors, containers or generators of
    random numbers. What stands inside containers, and other objects, are not copied. Its backward
    hooks are off: gradients here are not those of training.
    """
    cuda = []
    if torch.cuda.is_initialized():
        cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    copy_of = dict(COPIES)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cuda))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            copy_of |= dict.fromkeys((numpy.random.Generator, numpy.random.RandomState), deepcopy)
        try:
            copies = {id(buffer): buffer.clone() for *_, buffer in buffers}
            for module, name, buffer in buffers:
                setattr(module, name, copies[id(buffer)])
            for module, before in zip(modules, attributes, strict=True):
                here = vars(module)
                for name, value in before.items():
                    if type(value) in copy_of and not name.startswith("_"):
                        if id(value) not in copies:
                            copies[id(value)] = copy_of[type(value)](value)
                        here[name] = copies[id(value)]
                # Not .eval(): some override it and merge weights in it.
                here |= {n: off for n, off in OFF.items() if n in before}
            yield
        finally:
            for module, name, buffer in buffers:
                setattr(module, name, buffer)
            for module, before in zip(modules, attributes, strict=True):
                for name in vars(module).keys() - before.keys():
                    delattr(module, name)
                vars(module).update(before)
