"""Contractions with known constants and inverses."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from invformer.numerics.norms import Norm

CONSTANTS = (0.3, 0.5, 0.7, 0.9, 0.95, 0.99)


def orthogonal(*shape: int) -> Tensor:
    """Random orthogonal matrices (*batch, n, n)."""
    return torch.linalg.qr(torch.randn(*shape))[0]


def two_layers(
    tokens: int, width: int, c: float, norm: Norm, dtype: torch.dtype = torch.float64
) -> Callable[[Tensor], Tensor]:
    """f(x) = A tanh(x W₁ + b) W₂ of constant at most c, in weights that ``dtype`` can hold.

    A averages over earlier tokens. In token_max and entry_max that costs nothing; in frobenius it
    would cost √N, so there A = I.
    """
    spread = torch.logspace(0, -1, width)
    w_in = orthogonal(width, width) * spread @ orthogonal(width, width)
    w_out = w_in.mT if torch.rand(()) < 0.5 else orthogonal(width, width)
    mixing = torch.eye(tokens)
    if norm != "frobenius":
        mixing = torch.rand(tokens, tokens).tril()
        mixing = mixing / mixing.sum(-1, keepdim=True)
    below = 1 - (1e-12 if dtype == torch.float64 else 1e-6)  # rounding may lengthen the weights
    weights = [
        w.to(dtype)
        for w in (
            below * w_in / token_constant(w_in, norm),
            torch.randn(width),
            c * below * w_out / token_constant(w_out, norm),
            below * mixing,
        )
    ]

    def f(x: Tensor) -> Tensor:
        w_in, bias, w_out, mixing = (w.to(x.dtype) for w in weights)
        return mixing @ torch.tanh(x @ w_in + bias) @ w_out

    return f


def token_constant(w: Tensor, norm: Norm) -> Tensor:
    """The constant of x ↦ x W per token."""
    return torch.linalg.matrix_norm(w.mT, math.inf if norm == "entry_max" else 2)
