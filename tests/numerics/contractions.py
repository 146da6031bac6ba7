"""Contractions with known constants and inverses, one independent map per sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from invformer.numerics.norms import Norm


def orthogonal(*shape: int) -> Tensor:
    """Random orthogonal matrices (*batch, n, n)."""
    return torch.linalg.qr(torch.randn(*shape))[0]


def spectrally_normalised(w: Tensor, norm: Norm) -> Tensor:
    """Scaled so that x ↦ x W has constant one per token in the norm, just from below."""
    if norm == "entry_max":
        size = w.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    else:
        size = torch.linalg.matrix_norm(w, 2, keepdim=True)
    return w / size * (1 - 1e-12)


@dataclass(frozen=True)
class TwoLayers:
    """f(x) = c (A) tanh(x W₁ + b) W₂ with ‖W₁‖ = ‖W₂‖ = 1 and A averaging over earlier tokens.

    The weights have a batch dimension: every sample has a map of its own. In token_max and
    entry_max an average over tokens costs nothing; in frobenius it would cost √N, so there A = I.
    """

    w_in: Tensor
    bias: Tensor
    w_out: Tensor
    mixing: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        w_in, bias, w_out, mixing = (
            w.to(x.dtype) for w in (self.w_in, self.bias, self.w_out, self.mixing)
        )
        return mixing[: x.shape[-2], : x.shape[-2]] @ torch.tanh(x @ w_in + bias) @ w_out


def two_layers(
    batch: int, tokens: int, width: int, c: float, norm: Norm, dtype: torch.dtype = torch.float64
) -> TwoLayers:
    """Random maps with constant at most c in the norm, in weights that ``dtype`` can hold."""
    spread = torch.logspace(0, -1, width)
    w_in = orthogonal(batch, width, width) * spread @ orthogonal(batch, width, width)
    w_out = torch.where(torch.rand(batch, 1, 1) < 0.5, w_in.mT, orthogonal(batch, width, width))
    mixing = torch.eye(tokens)
    if norm != "frobenius":
        mixing = torch.rand(tokens, tokens).tril()
        mixing = mixing / mixing.sum(-1, keepdim=True)
    below = 1 if dtype == torch.float64 else 1 - 1e-6  # rounding the weights may lengthen them
    return TwoLayers(
        w_in=spectrally_normalised(w_in, norm).to(dtype),
        bias=torch.randn(batch, 1, width).to(dtype),
        w_out=(c * below * spectrally_normalised(w_out, norm)).to(dtype),
        mixing=(mixing * below).to(dtype),
    )


def slow_map(batch: int, tokens: int, width: int, c: float) -> Callable[[Tensor], Tensor]:
    """f(x) = c tanh(x S), S symmetric with eigenvalues 1 … 0.03: Picard needs log ε / log c."""
    q = orthogonal(batch, width, width)
    s = q * torch.logspace(0, -1.5, width) @ q.mT * (1 - 1e-12)
    return lambda x: c * torch.tanh(x @ s.to(x.dtype))


def linear_map(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """f(x) = M x on the flattened sample, M (*batch, ND, ND)."""
    return lambda x: (matrix.to(x.dtype) @ x.flatten(-2).unsqueeze(-1)).view(x.shape)


def planted_inverse(matrix: Tensor, y: Tensor) -> Tensor:
    """The x with x + M x = y."""
    identity = torch.eye(matrix.shape[-1])
    return torch.linalg.solve(identity + matrix, y.flatten(-2)).view(y.shape)


@dataclass(frozen=True)
class CausalL2:
    """Tied L2 attention in plain operations: a causal map whose tokens do mix."""

    w_q: Tensor
    g: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        q = torch.einsum("...na,had->...hnd", x, self.w_q.to(x.dtype))
        p = self.weights(q)
        return torch.einsum("...hij,...hjd,hdb->...ib", p, q, self.g.to(x.dtype))

    def weights(self, q: Tensor) -> Tensor:
        """softmax over the past of −‖q_i − q_j‖²/√d."""
        distance = (q.unsqueeze(-2) - q.unsqueeze(-3)).square().sum(-1)
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (-distance / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
