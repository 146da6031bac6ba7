"""Names that are private to PyTorch, where it has no public ones.

For their sake pyproject.toml bounds the version of torch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree

Function = TypeVar("Function", bound=Callable[..., bool])

# Functions of lists of tensors, as PyTorch's optimisers use them: on a GPU one launch for all.
_torch: Any = torch
foreach_copy_ = _torch._foreach_copy_
foreach_lerp = _torch._foreach_lerp
foreach_lerp_ = _torch._foreach_lerp_
foreach_mul_ = _torch._foreach_mul_
foreach_norm = _torch._foreach_norm
foreach_sub_ = _torch._foreach_sub_
# Attributes of a module that hold functions of its user, which run in backward passes.
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
# The tensors in containers of containers, and such containers of other tensors.
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten


def is_transformed() -> bool:
    """True under ``torch.func``, whose tensors have no memory."""
    return torch._C._are_functorch_transforms_active()


def has_hooks(module: nn.Module) -> bool:
    """True if functions of its user run before or after its forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def constant_when_compiled(function: Function) -> Function:
    """Let torch.compile take the answers of a function as constants.

    torch.compiler.assume_constant_result does this too, but loads the compiler first (1.5 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
