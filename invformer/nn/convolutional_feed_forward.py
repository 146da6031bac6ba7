"""Feed-forwards whose hidden units also see earlier tokens: free, or contractive in their own."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.bounds import layers
from invformer.nn.attention import AttentionCache
from invformer.nn.channel_metric import Metrics
from invformer.nn.feed_forward import (
    Activation,
    ContractiveFeedForward,
    FeedForward,
    FeedForwardWeights,
    without_sharpness,
)
from invformer.numerics.norms import Norm
from invformer.numerics.token_shift import windows

# Pre-activations of earlier tokens' unit-variance channels, at first.
INITIAL_PAST = 0.5


def at_least_two(kernel: int) -> int:
    """The kernel, if it sees an earlier token.

    Raises:
        ValueError: it does not.
    """
    if kernel < 2:
        raise ValueError(f"a kernel of {kernel} sees no earlier token: needs at least 2")
    return kernel


class ConvolutionalFeedForward(FeedForward):
    """x_i ↦ W₂ φ(Σ_{l=0}^{k−1} V_l x_{i−l} + b₁) + b₂, unconstrained.

    Args:
        d_model: width D.
        d_ff: number of hidden units.
        kernel: k ≥ 2, tokens that a hidden unit sees, its own among them.
        activation: φ.

    Raises:
        ValueError: the kernel has no earlier token.
    """

    def __init__(
        self, d_model: int, d_ff: int, kernel: int, activation: Activation = "gelu"
    ) -> None:
        super().__init__(d_model, d_ff, activation)
        self.kernel = at_least_two(kernel)
        self[0] = nn.Linear(kernel * d_model, d_ff)

    def forward(
        self, input: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply it to every token and those before."""
        return super().forward(windows(input, self.kernel))

    def next_outputs(
        self, x: Float[Tensor, "*batch new width"], past: AttentionCache
    ) -> Float[Tensor, "*batch new width"]:
        """The outputs of tokens that come after those in ``past``, which takes them in."""
        return next_outputs(self, self.kernel, x, past)


class ContractiveConvolutionalFeedForward(ContractiveFeedForward):
    """f(X)_i = c Ŵ₂ φ_β(Ŵ₁ x_i + Σ_{l=1}^{k−1} V_l x_{i−l}/β + b) / lip(φ): ‖∂f_i/∂x_i‖₂ ≤ c.

    The first layer is a causal convolution over k tokens. To invert a causal block its diagonal
    blocks have to contract, and those know Ŵ₁ only: what earlier tokens enter with, V, is free.
    Lip(f) ≤ c (1 + Σ_l ‖V_l/β‖₂), finite but not held at c.

    Args:
        d_model: width D.
        d_ff: number of hidden units.
        lipschitz_target: c in (0, 1).
        kernel: k ≥ 2, tokens that a hidden unit sees, its own among them.
        options: those of :class:`ContractiveFeedForward`, held in ``spectral``.

    Raises:
        ValueError: the kernel has no earlier token, or another norm is asked for.

    Source: ours, docs/numerics.md §16.
    """

    is_token_wise = False

    def __init__(
        self, d_model: int, d_ff: int, lipschitz_target: float, kernel: int, **options: Any
    ) -> None:
        super().__init__(d_model, d_ff, lipschitz_target, **options)
        if self.norm != "spectral":
            raise ValueError(f"a kernel over tokens is held in spectral norms, not in {self.norm}")
        self.kernel = at_least_two(kernel)
        past = (kernel - 1) * d_model
        self.w_past = nn.Parameter(INITIAL_PAST / math.sqrt(past) * torch.randn(past, d_ff))

    def kind(self) -> Hashable:
        """Shape, activation, norm and kernel."""
        return super().kind(), self.kernel

    @staticmethod
    def forward_weights(
        branches: Sequence[Any], metrics: Metrics | None = None
    ) -> list[FeedForwardWeights]:
        """[Ŵ₁β; V_1; …; V_{k−1}] and the rest as without a past, of every branch; no metrics."""
        own = ContractiveFeedForward.forward_weights(branches)
        return [
            w._replace(w_in=torch.cat([w.w_in, b.w_past]))
            for b, w in zip(branches, own, strict=True)
        ]

    def next_outputs(
        self, x: Float[Tensor, "*batch new width"], past: AttentionCache
    ) -> Float[Tensor, "*batch new width"]:
        """The outputs of tokens that come after those in ``past``, which takes them in."""
        return next_outputs(self, self.kernel, x, past)

    def bound_by_construction(self, norm: Norm) -> Tensor | None:
        """c (1 + Σ_l ‖V_l/β‖_F), as ‖·‖₂ ≤ ‖·‖_F."""
        own = super().bound_by_construction(norm)
        if own is None:
            return None
        past = (self.w_past / self.log_sharpness.exp()).detach().double()
        sizes = past.unflatten(0, (self.kernel - 1, -1)).flatten(1).norm(dim=-1)
        return own * (1 + sizes.sum())

    def own_token_by_construction(self) -> Tensor | None:
        """c."""
        return super().bound_by_construction("token_max")

    def causal_bound(self, dtype: torch.dtype | None = None) -> float:
        """Certified norm of the diagonal Jacobian blocks ∂f_i/∂x_i: not a constant of f."""
        (own, *_), w_out = without_sharpness(self.weights(), dtype)
        return layers.feed_forward_bound(own, w_out, self.activation, "token_max")


def next_outputs(
    module: nn.Module, kernel: int, x: Float[Tensor, "*batch new width"], past: AttentionCache
) -> Float[Tensor, "*batch new width"]:
    """What a module that sees ``kernel`` tokens puts out for those that come after ``past``."""
    (seen,) = past.append(x)
    needed = x.shape[-2] + kernel - 1
    return module(seen[..., -needed:, :])[..., -x.shape[-2] :, :]
