"""Feed-forward maps: the ordinary one, and one that contracts by construction."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from invformer.branches import compiled
from invformer.branches.branch import Branch, LipschitzBranch, weights_together
from invformer.branches.compiled import Fields
from invformer.branches.feed_forward.activations import (
    ACTIVATION_SLOPE,
    ACTIVATIONS,
    IN_PLACE,
    MODULES,
    Activation,
)
from invformer.branches.feed_forward.bounds import (
    FeedForwardWeights,
    feed_forward_bounds,
    without_sharpness,
)
from invformer.branches.feed_forward.enclosed import EnclosedFeedForward
from invformer.branches.feed_forward.jacobian import StackedFeedForward
from invformer.numerics.norms import Norm, Tokens, vector_norm
from invformer.numerics.residual_equation import Kind
from invformer.numerics.rounding import sum_up
from invformer.numerics.token_shift import windows
from invformer.weights.affine import affine
from invformer.weights.scaling import ScalingWeights
from invformer.weights.spectral import (
    INITIAL_OUTPUT,
    SpectralNormalised,
    normalised_weights,
    write_to,
)

# Spectral normalisation leaves pre-activations small; without this every unit starts out linear.
INITIAL_SHARPNESS = 8.0
# Pre-activations of earlier tokens' unit-variance channels, at first.
INITIAL_PAST = 0.5


class FeedForward(nn.Sequential, Branch):  # pyright: ignore[reportIncompatibleVariableOverride]
    """x_i ↦ W₂ φ(Σ_{l=0}^{k−1} V_l x_{i−l} + b₁) + b₂, unconstrained.

    ``d_ff`` hidden units with activation φ see k = ``kernel`` tokens: their own and those before.
    """

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation = "gelu", kernel: int = 1
    ) -> None:
        super().__init__(nn.Linear(d_model, d_ff), MODULES[activation](), nn.Linear(d_ff, d_model))
        self.activation: Activation = activation
        self.kernel = kernel
        if kernel > 1:
            self[0] = nn.Linear(kernel * d_model, d_ff)

    def forward(self, input: Tokens) -> Tokens:
        """f of every token and the k − 1 tokens before it."""
        return super().forward(windows(input, self.kernel))

    @property
    def reach(self) -> int:
        """k: hidden units see so many tokens."""
        return self.kernel

    def linear_maps(self) -> tuple[nn.Linear, nn.Linear]:
        """Those with W₁, b₁ and with W₂, b₂."""
        return cast(nn.Linear, self[0]), cast(nn.Linear, self[2])

    def enclosed(self, weights: None, length: int) -> EnclosedFeedForward:
        """As :meth:`.Branch.enclosed`."""
        first, last = self.linear_maps()
        output = torch.cat([last.weight.mT, last.bias[None]])
        return EnclosedFeedForward(first.weight.mT, first.bias, output, self.activation)

    @property
    def is_compiled(self) -> bool:
        """As :meth:`.Branch.is_compiled`: True if nobody replaced a part."""
        parts = [type(part) for part in self]
        biased = len(list(self.parameters())) == 4
        return parts == [nn.Linear, MODULES[self.activation], nn.Linear] and biased

    def compiled_fields(self, weights: None) -> Fields:
        """As :meth:`.Branch.compiled_fields`."""
        first, last = self.linear_maps()
        own = compiled.maps(first.weight.T, last.weight.T) | {"c": last.bias}
        return own | hidden_units(self.activation, first.bias, self.kernel)


class ContractiveFeedForward(LipschitzBranch[FeedForwardWeights]):
    """f(x) = c Ŵ₂ φ_β(Ŵ₁ x + b) / lip(φ),  φ_β(h) = φ(βh)/β,  ‖Ŵ₁‖, ‖Ŵ₂‖ ≤ 1: Lip(f) ≤ c.

    φ_β has the slopes of φ for every β > 0, so a hidden unit can learn its sharpness without
    changing the constant (Chen et al. 2019 learn one β for LipSwish; here each unit has its own).
    The constant holds per token, hence in ``token_max`` and in ``frobenius``.

    With ``kernel`` = k > 1 a hidden unit sees Ŵ₁ x_i + Σ_{l=1}^{k−1} V_l x_{i−l}/β + b. Diagonal
    blocks depend on Ŵ₁ only: ‖∂f_i/∂x_i‖₂ ≤ c for any V, which is enough to invert a causal block.
    Lip(f) ≤ c (1 + Σ_l ‖V_l/β‖₂) is finite but not held at c (docs/numerics.md §16).

    The other arguments are those of :class:`FeedForward`.

    Args:
        activation: φ; its largest slope, rounded up, divides.
        norm: ``spectral`` holds ‖W‖₂ at one (token_max and frobenius); ``entry_max`` the row sums.
        output_channels: channels the output map writes to at initialisation (None: all).
        initial_sharpness: β of every hidden unit at initialisation.
        initial_output: size of the output map's entries at initialisation.
    """

    is_proven = True
    stacked = StackedFeedForward

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        lipschitz_target: float,
        activation: Activation = "silu",
        norm: Literal["spectral", "entry_max"] = "spectral",
        output_channels: slice | None = None,
        initial_sharpness: float = INITIAL_SHARPNESS,
        initial_output: float = INITIAL_OUTPUT,
        kernel: int = 1,
    ) -> None:
        super().__init__(lipschitz_target)
        self.activation: Activation = activation
        self.norm: Literal["spectral", "entry_max"] = norm
        self.kernel = kernel
        self.w_in = SpectralNormalised(torch.randn(d_model, d_ff) / math.sqrt(d_model))
        self.b_in = nn.Parameter(torch.zeros(d_ff))
        w_out = initial_output * torch.randn(d_ff, d_model)
        self.w_out = SpectralNormalised(write_to(w_out, output_channels))
        self.log_sharpness = nn.Parameter(torch.full((d_ff,), math.log(initial_sharpness)))
        if kernel > 1:
            past = (kernel - 1) * d_model
            self.w_past = nn.Parameter(INITIAL_PAST / math.sqrt(past) * torch.randn(past, d_ff))

    def forward(
        self, x: Tokens, weights: FeedForwardWeights | None = None, centre: Tensor | None = None
    ) -> Tokens:
        """φ((X + m) W + b) V; φ overwrites its argument unless a gradient needs it."""
        weights = weights or self.weights()
        hidden = affine(windows(x, self.kernel), weights.w_in, weights.b_in, centre)
        activation = (ACTIVATIONS if torch.is_grad_enabled() else IN_PLACE)[self.activation]
        return activation(hidden) @ weights.w_out

    @property
    def reach(self) -> int:
        """k: hidden units see so many tokens."""
        return self.kernel

    @property
    def folds_scaling(self) -> bool:
        """True for one token: before the first x + m = 0 if scalings are folded, but x = 0."""
        return self.kernel == 1

    def group(self) -> Hashable:
        """Shape, activation, norm and kernel."""
        return type(self), self.w_in.weight.shape, self.activation, self.norm, self.kernel

    @staticmethod
    def weights_of(
        branches: Sequence["ContractiveFeedForward"], scalings: ScalingWeights | None = None
    ) -> list[FeedForwardWeights]:
        """Ŵ₁β, b₁β, c Ŵ₂/(lip(φ) β) and β of each; with scalings D Ŵ₁β and c Ŵ₂D⁻¹/(lip(φ) β).

        With a kernel [Ŵ₁β; V_1; …; V_{k−1}] for Ŵ₁β.
        """
        first, norm = branches[0], branches[0].norm
        sharpness = torch.stack([b.log_sharpness for b in branches]).exp()
        per_slope = torch.stack([b.target_scale() for b in branches])
        scale = (per_slope / ACTIVATION_SLOPE[first.activation])[:, None] / sharpness
        rows = None if scalings is None else scalings.scale[:, :, None]
        columns = None if scalings is None else scalings.inverse[:, None, :]
        w_in = normalised_weights([b.w_in for b in branches], sharpness[:, None, :], rows, norm)
        if first.kernel > 1:
            w_in = torch.cat([w_in, torch.stack([b.w_past for b in branches])], dim=-2)
        b_in = torch.stack([b.b_in for b in branches]) * sharpness
        w_out = normalised_weights([b.w_out for b in branches], scale[:, :, None], columns, norm)
        return list(map(FeedForwardWeights, w_in, b_in, w_out, sharpness))

    def inner_size(self, norm: Norm, num_tokens: int, weights: FeedForwardWeights) -> float:
        """‖diag(b) V‖_F of a token: the size of the biases before they cancel."""
        terms = (weights.b_in.detach()[:, None] * weights.w_out.detach()).double()
        per_channel = torch.linalg.vector_norm(terms, dim=0)
        return vector_norm(per_channel.expand(num_tokens, -1), norm).item()

    @staticmethod
    def bounds_of(
        branches: Sequence["ContractiveFeedForward"],
        norm: Norm,
        kind: Kind,
        dtype: torch.dtype | None,
        weights: Sequence[FeedForwardWeights],
    ) -> list[float]:
        """Σ_l Lip of lag l; diagonal Jacobian blocks ∂f_i/∂x_i know Ŵ₁ only."""
        by_lag, w_out = without_sharpness(weights_together(weights), dtype)
        if kind == "causal":
            by_lag, norm = by_lag[:1], "token_max"
        activation = branches[0].activation
        of_lags = [feed_forward_bounds(w_in, w_out, activation, norm) for w_in in by_lag]
        return list(map(sum_up, *of_lags))

    def enclosed(self, weights: FeedForwardWeights, length: int) -> EnclosedFeedForward:
        """As :meth:`.Branch.enclosed`."""
        w_in, b_in, w_out, _ = weights
        return EnclosedFeedForward(w_in, b_in, w_out, self.activation)

    def compiled_fields(self, weights: FeedForwardWeights) -> Fields:
        """As :meth:`.Branch.compiled_fields`."""
        own = compiled.maps(weights.w_in, weights.w_out)
        return own | hidden_units(self.activation, weights.b_in, weights.kernel)


def hidden_units(activation: Activation, b: Tensor, kernel: int) -> Fields:
    """What a feed-forward computes between its maps; compiled code has numbers for activations."""
    return {"b": b, "activation": list(ACTIVATIONS).index(activation), "kernel": kernel}
