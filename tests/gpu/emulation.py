"""A processor that follows CUDA's rules, as far as Python can see them.

Autocast on CUDA casts operations that autocast on a processor leaves alone, so that a gradient may
come in another format than the input it belongs to. And where the device is a processor, the code
looks at values that it leaves on an accelerator, and calls C++. :func:`cuda_rules` has the first
and forgoes the second.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The operations of PyTorch's automatic mixed precision page, section CUDA, by name. Those that run
# in half precision are the same on a processor, which casts them itself.
# fmt: off
SINGLE = {
    "pow", "rpow", "rdiv", "rtruediv", "acos", "asin", "cosh", "sinh", "tan", "exp", "expm1", "log",
    "log10", "log1p", "log2", "reciprocal", "rsqrt", "erfinv", "softplus", "cdist", "dist", "norm",
    "normalize", "renorm", "layer_norm", "group_norm", "cosine_similarity", "cross_entropy",
    "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div",
}
SINGLE_BY_DEFAULT = {  # unless they are given a dtype
    "sum", "prod", "cumsum", "cumprod", "softmax", "softmin", "log_softmax", "vecdot",
    "vector_norm", "matrix_norm", "linalg_vecdot", "linalg_vector_norm", "linalg_matrix_norm",
}
WIDEST = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "tensordot",
          "scatter_add", "grid_sample"}
# fmt: on
# Where the code asks whether it may look at numbers, and what a processor does better.
LOOKS = [
    "invformer.kernels.native_matrices.can_take",
    "invformer.kernels.native.is_available",
    "invformer.numerics.spectral_norm.eigenvalues_are_cheap",
]
if find_spec("lightning"):  # a wheel that may be missing
    LOOKS.append("invformer.training.module.CharLanguageModel.refuses_at_once")


class CudaAutocast(TorchFunctionMode):
    """Where autocast is on, casts what it would cast on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            name = func.__name__.strip("_")
            by_default = name in SINGLE_BY_DEFAULT and kwargs.get("dtype") is None
            if name in SINGLE or by_default:
                args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
            elif name in WIDEST and torch.float32 in {t.dtype for t in args if is_single(t)}:
                args = cast(args, torch.float32)
        return func(*args, **kwargs)


def is_single(x: Any) -> bool:
    """Whether autocast would touch it."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Tensors, also in containers, in another format."""
    if is_single(x):
        return x.to(dtype)
    if isinstance(x, list | tuple):
        return type(x)(cast(y, dtype) for y in x) if type(x) in (list, tuple) else x
    return {k: cast(y, dtype) for k, y in x.items()} if isinstance(x, dict) else x


@contextmanager
def cuda_rules() -> Iterator[None]:
    """CUDA's autocast, and the code that runs where nobody looks at numbers."""
    with ExitStack() as stack:
        for name in LOOKS:
            stack.enter_context(patch(name, lambda *_: False))
        stack.enter_context(CudaAutocast())
        yield
