"""Local Lipschitz constants of the submodules of any model, by autograd: estimates, no bounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from invformer.kernels.attention import only
from invformer.lipschitz.power_iteration import operator_norm
from invformer.nn.transformer import evaluating
from invformer.numerics.linear_map import linearise
from invformer.numerics.precision import changed, without_autocast


@dataclass(frozen=True)
class LocalConstants:
    """The local constant of every submodule by its name, and why others have none."""

    values: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def local_constants(
    model: nn.Module, *inputs: Any, num_steps: int = 50, rtol: float = 1e-3
) -> LocalConstants:
    """‖∂f/∂x‖₂ of every submodule f of any model, from below, where the model's input takes it.

    A submodule is measured if its first argument x is the only floating-point tensor among the
    positional ones and it returns one, at the x of its first call in ``model(*inputs)``. All its
    other arguments keep their values of that call. ‖·‖₂ is the norm in frobenius for all entries
    of x together: the largest over the samples if f does not mix them. The model is in eval mode
    meanwhile, and autocast is off; weights, buffers and global random numbers stay as they are.
    Values are gains of vectors, so below the constant up to rounding, and nothing is proven about
    other inputs. Power iteration stops at a residual of ``rtol``, or after ``num_steps`` of up to 3
    backward passes each. Submodules without a second derivative are skipped.
    """
    inputs_of: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}
    outputs: dict[str, Any] = {}

    def keep_inputs(name: str, module: nn.Module, args: Any, named: Any) -> None:
        if name not in inputs_of:  # copies, because the model may overwrite its activations
            inputs_of[name] = tree_map_only(Tensor, Tensor.clone, (args, named))

    def keep_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs.setdefault(name, output)

    submodules = dict(model.named_modules())
    device = next(model.parameters(), torch.empty(0)).device
    found = LocalConstants()
    # Fused attention has no second derivative, and the fast path of PyTorch's encoders calls no
    # submodules. A compiled module that is called in another way than training calls it would be
    # compiled anew, and training might change with it.
    mha = torch.backends.mha
    with (
        evaluating(model),
        without_autocast(device),
        only("math"),
        changed(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
        sdpa_kernel(SDPBackend.MATH),
        torch.compiler.set_stance("force_eager"),
    ):
        hooks = []
        for name, module in submodules.items():
            hook = partial(keep_inputs, name)
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(keep_output, name)))
        try:
            model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        for name, module in submodules.items():
            if name not in outputs:
                found.skipped[name] = "it is not called"
                continue
            (args, named), output = inputs_of[name], outputs[name]
            if [i for i, x in enumerate(args) if is_real(x)] != [0] or not is_real(output):
                found.skipped[name] = "it does not map one floating-point tensor to one"
                continue
            if output.dtype.itemsize < 4:
                found.skipped[name] = f"it computes in {output.dtype}; measure model.float()"
                continue
            try:
                jacobian = linearise(*on_one_row(module, args, named))
                estimate = operator_norm(jacobian, "frobenius", num_steps=num_steps, rtol=rtol)
                found.values[name] = estimate.value.item()
            except RuntimeError as error:
                found.skipped[name] = f"it cannot be derived twice ({str(error).splitlines()[0]})"
    return found


def on_one_row(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """f as a map of rows, (1, size of x) → (1, size of f(x)), and x as such a row."""
    x, *others = args

    def f(row: Tensor) -> Tensor:
        here = row.view(x.shape).clone()  # which the module may overwrite
        return module(here, *others, **named).reshape(1, -1)

    return f, x.reshape(1, -1)


def is_real(x: Any) -> bool:
    """True if x is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()
