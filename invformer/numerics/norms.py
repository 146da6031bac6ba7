"""The norms in which a Lipschitz constant can be stated; they are not comparable."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import at_least_single
from invformer.numerics.rounding import round_up

Norm = Literal["token_max", "frobenius", "entry_max"]
NORMS: tuple[Norm, ...] = get_args(Norm)
# Sequences of vectors, (*batch, N, D).
Tokens = Float[Tensor, "*batch tokens width"]


def vector_norm(x: Tokens, norm: Norm) -> Float[Tensor, "*batch"]:
    """‖X‖ of each sequence: ``token_max`` = maxᵢ ‖xᵢ‖₂, ``frobenius``, ``entry_max`` = max |X_ik|.

    A constant in one norm says nothing about a constant in another.
    """
    match norm:
        case "token_max":
            return torch.linalg.vector_norm(x, dim=-1).amax(-1)
        case "frobenius":
            return torch.linalg.vector_norm(x, dim=(-2, -1))
        case "entry_max":
            return x.abs().amax((-2, -1))
    raise unknown_norm(norm)


def dual_norm(x: Tokens, norm: Norm) -> Float[Tensor, "*batch"]:
    """sup ⟨X, Z⟩ over ‖Z‖ ≤ 1: Σᵢ ‖xᵢ‖₂ for ``token_max``, ``frobenius`` itself, or Σ |X_ik|."""
    match norm:
        case "token_max":
            return torch.linalg.vector_norm(x, dim=-1).sum(-1)
        case "frobenius":
            return vector_norm(x, norm)
        case "entry_max":
            return x.abs().sum((-2, -1))
    raise unknown_norm(norm)


def unknown_norm(norm: str) -> ValueError:
    """The error for a norm that is not among :data:`NORMS`."""
    return ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")


def norm_upper(x: Tokens, norm: Norm) -> Float[Tensor, "*batch"]:
    """A float64 ≥ ‖X‖ on the processor, for X as it is stored: rounding and underflow included."""
    x, size = at_least_single(x), x.shape[-1] * x.shape[-2]
    format = torch.finfo(x.dtype)
    underflow = math.sqrt(size * format.tiny)
    return vector_norm(x, norm).double().cpu() * (1 + (size + 8) * format.eps) + underflow


def dual_vector(o: Tensor, norm: Norm) -> Tensor:
    """The a with ⟨a, o⟩ = ‖o‖ and dual norm one (zero where o is)."""
    match norm:
        case "frobenius":
            return divide(o, vector_norm(o, norm)[..., None, None])
        case "token_max":
            length = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
            if o.shape[-2] == 1:  # the only token is the largest
                return divide(o, length)
            return divide(o, length) * _one_hot_arg_max(length.flatten(-2)).unsqueeze(-1)
        case "entry_max":
            return o.sign() * _one_hot_arg_max(o.abs().flatten(-2)).view(o.shape)


def stationarity(x: Tensor, w: Tensor, gain: Tensor, norm: Norm) -> Tensor:
    """Frobenius: ‖JᵀJx/σ² − x‖/‖x‖. Else (sup_z ⟨w, z⟩ − gain)/gain."""
    match norm:
        case "frobenius":
            unit = x / vector_norm(x, norm)[..., None, None]
            residual = vector_norm(divide(w, gain[..., None, None]) - unit, norm)
        case "token_max":
            residual = divide(torch.linalg.vector_norm(w, dim=-1).sum(-1) - gain, gain)
        case "entry_max":
            residual = divide(w.abs().sum((-2, -1)) - gain, gain)
    return torch.where(gain == 0, torch.zeros_like(gain), residual)


def _one_hot_arg_max(a: Tensor) -> Tensor:
    """One at the first largest entry of the last dimension, zero elsewhere."""
    return torch.zeros_like(a).scatter_(-1, a.argmax(-1, keepdim=True), 1)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and a where b = 0."""
    return a / torch.where(b == 0, torch.ones_like(b), b)


def row_sum_bound(w: Float[Tensor, "m n"]) -> float:
    """‖W‖_∞ = max_i Σ_j |W_ij|, computed in float64 and rounded up."""
    sums = w.detach().to(torch.float64).abs().sum(-1)
    return round_up(sums.amax().item(), w.shape[-1])
