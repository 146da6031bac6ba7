"""Local Lipschitz constants of the submodules of any model, by autograd: estimates, no bounds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from invformer.lipschitz.calls import Call, called_with, first_real, is_linear, of_matrix
from invformer.lipschitz.measuring import measuring
from invformer.lipschitz.power_iteration import LipschitzEstimate, operator_norm
from invformer.numerics.linear_map import LinearMap

# Difference quotients are taken over these parts of ‖x‖, and may miss the derivative by so much.
DIFFERENCES, TOLERANCE = (1e-2, 1e-3, 1e-4), 0.05


@dataclass(frozen=True)
class LocalConstants:
    """The local constant of every submodule by its name, and why others have none.

    ``notes`` says of a measured submodule what is done in another way than in training.
    """

    values: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class UnmeasurableError(Exception):
    """Why a submodule has no value."""


@torch.no_grad()
def local_constants(
    model: nn.Module, *inputs: Any, num_steps: int = 50, rtol: float = 1e-3
) -> LocalConstants:
    """‖∂f/∂x‖₂ of every submodule f of any model, from below, where the model's input takes it.

    x is the first floating-point tensor among the arguments of f, positional ones before keywords,
    wherever it stands in tuples, lists, dictionaries and dataclasses, at the first call of f in
    ``model(*inputs)``, or in ``model(**inputs)`` if ``inputs`` is one dictionary. The other
    arguments, such as masks and caches, keep their values of that call. The output is the first
    floating-point tensor that f returns; a scalar, such as a loss, only if there is nothing else.
    ‖·‖₂ is the norm in frobenius for all entries of x together: the largest over the samples if f
    does not mix them.

    The model is in eval mode meanwhile, autocast is off, activation checkpointing and fused
    attention are replaced by what has second derivatives. Weights, buffers, attributes, inputs
    and random numbers stay as they are. Values are gains of vectors, so below the constant up to
    rounding, and nothing is proven about other inputs. Power iteration stops at a residual of
    ``rtol``, or after ``num_steps`` of up to 3 backward passes each. A submodule is skipped, with
    the reason, if its output is not a number, if two evaluations differ, if difference
    quotients contradict autograd's derivative (``no_grad``, straight-through rounding), or if it
    has no second derivative.
    """
    found = LocalConstants()
    with measuring(model):
        for name, _, _, estimate in measure_calls(
            model, inputs, found, num_steps=num_steps, rtol=rtol
        ):
            found.values[name] = estimate.value.item()
    return found


def measure_calls(
    model: nn.Module,
    inputs: tuple[Any, ...],
    found: LocalConstants,
    *,
    num_steps: int,
    rtol: float,
    seed: int = 0,
) -> Iterator[tuple[str, Call, LinearMap, LipschitzEstimate]]:
    """The Jacobian of every submodule that has one and its norm; ``found`` says what has none."""
    for name, call in first_calls(model, inputs, found).items():
        try:
            jacobian = checked_jacobian(call)
            if is_linear(call):
                jacobian = of_matrix(call)
            estimate = operator_norm(
                jacobian, "frobenius", num_steps=num_steps, rtol=rtol, seed=seed
            )
        except UnmeasurableError as why:
            found.skipped[name] = str(why)
        except Exception as error:  # other people's code may raise anything
            found.skipped[name] = f"it cannot be derived twice ({one_line(error)})"
        else:
            yield name, call, jacobian, estimate
    for name in found.notes.keys() & found.skipped.keys():
        del found.notes[name]


def first_calls(
    model: nn.Module, inputs: tuple[Any, ...], found: LocalConstants
) -> dict[str, Call]:
    """The first call of every submodule that maps real tensors; the others are skipped."""
    calls: dict[str, Call] = {}
    outputs: dict[str, Tensor | None] = {}
    inside: list[str] = []

    def keep_inputs(name: str, module: nn.Module, args: Any, named: Any) -> None:
        inside.append(name)
        if name not in calls:
            calls[name] = Call(module, args, named)

    def keep_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()
        outputs.setdefault(name, first_real(output))

    class MathForm(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), named: Any = None):
            if func is F.scaled_dot_product_attention:
                note = "attention in its math form: fused kernels have no second derivative"
                found.notes.update(dict.fromkeys(inside, note))
            return func(*args, **(named or {}))

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            found.skipped[name] = "modules of TorchScript take no such hooks"
            continue
        hook = partial(keep_inputs, name)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(keep_output, name)))
    try:
        with MathForm():
            called_with(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name, _ in model.named_modules():
        y = outputs.get(name)
        if name not in outputs:
            found.skipped.setdefault(name, "it is not called")
        elif calls[name].x is None or y is None:
            found.skipped[name] = "it takes or returns no floating-point tensor"
        elif y.dtype.itemsize < 4:
            found.skipped[name] = f"it computes in {y.dtype}; measure model.float()"
    return {name: call for name, call in calls.items() if name not in found.skipped}


def checked_jacobian(call: Call) -> LinearMap:
    """∂f/∂x at a call, x and f(x) as rows: (1, size). Raises UnmeasurableError if it is not."""
    jacobian = call.jacobian()
    y = jacobian.value
    scale = y.nan_to_num(posinf=0.0, neginf=0.0).abs().amax() if y.numel() else 0.0
    noise = 100 * torch.finfo(y.dtype).eps * scale
    if not torch.allclose(call.on_row(call.row), y, rtol=0, atol=float(noise), equal_nan=True):
        raise UnmeasurableError("two evaluations at one input differ")
    v = random_like(call.row)
    image, a = jacobian.jvp(v), random_like(y)
    difference = (a * image).sum() - (jacobian.vjp(a) * v).sum()
    if bool(difference.abs() > 1e-3 * a.norm() * image.norm()):
        raise UnmeasurableError("it cannot be derived twice")
    if not is_derivative(image, v, call, y):
        if bool(y.isnan().any()):
            raise UnmeasurableError("its output is not a number")
        raise UnmeasurableError(
            "difference quotients contradict its derivative: torch.no_grad, detach or "
            "straight-through rounding inside"
        )
    return jacobian


def random_like(x: Tensor) -> Tensor:
    """A fixed random direction with the length of x, or 1 if x is 0."""
    generator = torch.Generator(x.device).manual_seed(x.numel())
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    length = x.nan_to_num(posinf=0.0, neginf=0.0).norm()
    return v * (torch.where(length > 0, length, 1.0) / v.norm())


def is_derivative(image: Tensor, v: Tensor, call: Call, y: Tensor) -> bool:
    """Whether (f(x + hv) − f(x − hv)) / 2h comes near the image Jv for a small h; y = f(x)."""
    x = call.row
    if not bool(image.isfinite().all()):
        return True  # a diverged model has no quotients to compare with; the value says so
    size = y.nan_to_num(posinf=0.0, neginf=0.0).norm()
    for h in DIFFERENCES:
        quotient = (call.on_row(x + h * v) - call.on_row(x - h * v)) / (2 * h)
        quotient = quotient.nan_to_num()  # ∞ − ∞ is 0 where logits are masked
        rounding = 4 * torch.finfo(y.dtype).eps * size / h
        allowed = TOLERANCE * torch.maximum(quotient.norm(), image.norm()) + rounding
        if bool((quotient - image).norm() <= allowed):
            return True
    return False


def one_line(error: Exception) -> str:
    """The first line of an error, or its kind."""
    return next(iter(str(error).splitlines()), type(error).__name__)
