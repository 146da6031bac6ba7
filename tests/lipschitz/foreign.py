"""Dense Jacobians of other people's submodules."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from invformer.lipschitz.calls import first_real, is_real, leaves, mapped


def agree(values: dict[str, float], true: dict[str, float], rtol: float = 0.01) -> None:
    """Every value is from below, and near."""
    for name, value in values.items():
        assert (1 - rtol) * true[name] <= value <= true[name] * (1 + 1e-9), name


def dense_constants(
    model: nn.Module, names: Iterable[str], *inputs: Any, **named: Any
) -> dict[str, float]:
    """‖∂f/∂x‖₂ of submodules from a Jacobian made row by row, in eval mode."""
    calls: dict[str, Any] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.setdefault(name, (args, kwargs)) and None,
            with_kwargs=True,
        )
        for name in names
    ]
    model.eval()
    with torch.no_grad():
        model(*inputs, **named)
    for hook in hooks:
        hook.remove()
    found = {}
    for name, given in calls.items():
        x = next(filter(is_real, leaves(given)))

        def f(new: torch.Tensor, name=name, given=given, x=x) -> torch.Tensor:
            here = new.clone()  # which it may overwrite
            args, kwargs = mapped(given, lambda leaf: here if leaf is x else leaf)
            return first_real(model.get_submodule(name)(*args, **kwargs))

        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.autograd.functional.jacobian(f, x.detach().clone())
        matrix = jacobian.reshape(-1, x.numel())
        found[name] = torch.linalg.matrix_norm(matrix, 2).item()
    return found
