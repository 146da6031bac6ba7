"""Feed-forward branches: the ordinary one, and those that contract by construction."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from invformer.nn.branch import LipschitzBranch, cast
from invformer.nn.spectral import (
    INITIAL_OUTPUT,
    SpectralNormalised,
    max_row_sum,
    scaled_weights,
    write_to,
)
from invformer.numerics.bounds import layers, local
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm
from invformer.numerics.rounding import product_up, sum_up
from invformer.numerics.token_shift import windows, windows_adjoint

Activation = Literal["silu", "gelu", "relu", "tanh"]
# Spectral normalisation leaves pre-activations small; without this every unit starts out linear.
INITIAL_SHARPNESS = 8.0
# Taking β out of folded matrices rounds every entry by 2⁻⁵³ of itself: ‖·‖₂ by √rank times that.
UNFOLDING = 1 + 2.0**-40
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}
# The same, written over their argument: without gradients, new memory costs more than the function.
IN_PLACE = {
    "silu": torch.ops.aten.silu_,
    "gelu": torch.ops.aten.gelu_,
    "relu": torch.relu_,
    "tanh": torch.tanh_,
}


class FeedForward(nn.Sequential):
    """x ↦ W₂ φ(W₁ x + b₁) + b₂ per token, unconstrained."""

    # Tokens that a hidden unit sees: its own and those before.
    kernel = 1

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu") -> None:
        super().__init__(nn.Linear(d_model, d_ff), Pointwise(activation), nn.Linear(d_ff, d_model))


class Pointwise(nn.Module):
    """An activation by name."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """φ(x), entry by entry."""
        return ACTIVATIONS[self.activation](x)


class FeedForwardWeights(NamedTuple):
    """The matrices a contractive feed-forward runs with, as (in, out), and its sharpness.

    ``w_past`` has a row for every channel of the tokens before, nearest first; here none.
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    sharpness: Tensor
    w_past: Tensor

    def by_lag(self) -> list[Tensor]:
        """W₁ and what the tokens before enter with, one (D, hidden) matrix per lag."""
        width = self.w_in.shape[-2]
        return [self.w_in] if self.kernel == 1 else [self.w_in, *self.w_past.split(width, dim=-2)]

    def joined(self) -> Tensor:
        """The same as one matrix, which windows of ``kernel`` tokens are multiplied by."""
        return self.w_in if self.kernel == 1 else torch.cat([self.w_in, self.w_past], dim=-2)

    @property
    def kernel(self) -> int:
        """Tokens that a hidden unit sees: its own and those before."""
        return 1 + self.w_past.shape[-2] // self.w_in.shape[-2]


# W₁ β, b β and W₂/β.
FoldedWeights = tuple[Tensor, Tensor, Tensor]


class ContractiveFeedForward(LipschitzBranch):
    """f(x) = c Ŵ₂ φ_β(Ŵ₁ x + b) / lip(φ),  φ_β(h) = φ(βh)/β,  ‖Ŵ₁‖, ‖Ŵ₂‖ ≤ 1: Lip(f) ≤ c.

    φ_β has the slopes of φ whatever β > 0, so every hidden unit learns how sharply it bends without
    touching the constant (Chen et al. 2019 learn one β for LipSwish; here each unit has its own).
    The constant holds per token, hence in ``token_max`` and in ``frobenius`` alike.

    Args:
        d_model: width D.
        d_ff: number of hidden units.
        lipschitz_target: c in (0, 1).
        activation: φ; its largest slope, rounded up, divides.
        norm: ``spectral`` holds ‖W‖₂ at one (token_max and frobenius); ``entry_max`` the row sums.
        output_channels: channels the output map writes to at initialisation (None: all).
        initial_sharpness: β of every hidden unit at initialisation.
        initial_output: size of the output map's entries at initialisation.
    """

    # Tokens that a hidden unit sees: its own and those before.
    kernel = 1

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
    ) -> None:
        super().__init__(lipschitz_target)
        self.activation: Activation = activation
        self.norm = norm
        self.w_in = SpectralNormalised(torch.randn(d_model, d_ff) / math.sqrt(d_model))
        self.b_in = nn.Parameter(torch.zeros(d_ff))
        w_out = initial_output * torch.randn(d_ff, d_model)
        self.w_out = SpectralNormalised(write_to(w_out, output_channels))
        self.log_sharpness = nn.Parameter(torch.full((d_ff,), math.log(initial_sharpness)))

    def output_scale(self) -> Tensor:
        """c/lip(φ), what Ŵ₂ is multiplied by."""
        return self.target_scale() / layers.ACTIVATION_SLOPE[self.activation]

    def effective_weights(self) -> FeedForwardWeights:
        """Ŵ₁, b, c Ŵ₂/lip(φ) and β."""
        if self.norm == "spectral":
            w_in, w_out = self.w_in(), self.w_out()
        else:
            tiny = torch.finfo(self.w_in.weight.dtype).tiny
            w_in = self.w_in.weight / max_row_sum(self.w_in.weight.mT).clamp_min(tiny)
            w_out = self.w_out.weight / max_row_sum(self.w_out.weight.mT).clamp_min(tiny)
        w_out = self.output_scale() * w_out
        sharpness = self.log_sharpness.exp()
        return FeedForwardWeights(w_in, self.b_in, w_out, sharpness, self.past_weight(sharpness))

    def past_weight(self, sharpness: Float[Tensor, "hidden"]) -> Float[Tensor, "past hidden"]:
        """What the tokens before enter with: nothing."""
        return self.b_in.new_zeros(0, len(sharpness))

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply f to every token."""
        w_in, b_in, w_out = self.folded_weights()
        hidden = torch.addmm(b_in, windows(x, self.kernel).flatten(0, -2), w_in)
        activation = (ACTIVATIONS if torch.is_grad_enabled() else IN_PLACE)[self.activation]
        return (activation(hidden) @ w_out).view(x.shape)

    def folded_weights(self) -> FoldedWeights:
        """Ŵ₁ β, b β and c Ŵ₂/(lip(φ) β): f(x) = φ(x W + b) V without passes over tokens for β.

        Certificates need the matrices apart from β (:meth:`effective_weights`).
        """
        if self.is_frozen:
            return self.derived(self._frozen, fold)
        return self._shared or self.forward_weights([self])[0]

    def kind(self) -> Hashable:
        """Shape, activation and norm."""
        return type(self), self.w_in.weight.shape, self.activation, self.norm

    @staticmethod
    def forward_weights(branches: Sequence["ContractiveFeedForward"]) -> list[FoldedWeights]:
        """The folded weights of every branch."""
        first = branches[0]
        if first.norm == "entry_max":
            return [fold(b.effective_weights()) for b in branches]
        sharpness = torch.stack([b.log_sharpness for b in branches]).exp()
        scale = torch.stack([b.output_scale() for b in branches])[:, None] / sharpness
        return list(
            zip(
                scaled_weights([b.w_in for b in branches], sharpness[:, None, :]),
                torch.stack([b.b_in for b in branches]) * sharpness,
                scaled_weights([b.w_out for b in branches], scale[:, :, None]),
                strict=True,
            )
        )

    def linearise(self, x: Float[Tensor, "*batch tokens width"]) -> LinearMap:
        """The Jacobian at X, token by token."""
        weights = self.weights()
        slope = slopes(x, weights, self.activation)
        return feed_forward_jacobian(x, slope, weights)

    def local_bound(
        self, x: Float[Tensor, "*batch tokens width"], norm: Norm, tight: bool = False
    ) -> Float[Tensor, "*batch"]:
        """A proven upper bound on ‖∂f/∂X‖ at each X; one number serves token_max and frobenius."""
        if norm == "entry_max":
            raise ValueError("no local bound in entry_max is known: use lipschitz_bound")
        weights = self.weights()
        slope = slopes(x, weights, self.activation)
        bound = local.feed_forward_local_bound if tight else local.feed_forward_fast_bound
        total = torch.stack([bound(slope, w, weights.w_out) for w in weights.by_lag()]).sum(0)
        return total.clamp(max=self.lipschitz_bound(norm))

    def bound_by_construction(self, norm: Norm) -> Tensor | None:
        """c in the norms that the normalisation holds."""
        held = ("entry_max",) if self.norm == "entry_max" else ("token_max", "frobenius")
        return self.correction.double() * self.lipschitz_target if norm in held else None

    def lipschitz_bound(self, norm: Norm, dtype: torch.dtype | None = None) -> float:
        """Certified Lip(f) in ``norm`` for the weights as cast to ``dtype``."""
        weights = as_used(self.weights(), dtype)
        bounds = (
            layers.feed_forward_bound(w, weights.w_out, self.activation, norm)
            for w in weights.by_lag()
        )
        return product_up(sum_up(*bounds), UNFOLDING)


def fold(weights: FeedForwardWeights) -> FoldedWeights:
    """W β, b β and W₂/β, W over all lags."""
    _, b_in, w_out, sharpness, _ = weights
    return weights.joined() * sharpness, b_in * sharpness, w_out / sharpness[:, None]


def as_used(weights: FeedForwardWeights, dtype: torch.dtype | None) -> FeedForwardWeights:
    """What a forward pass in ``dtype`` multiplies by: folded, cast, and β taken out in float64.

    φ(x W + b) V has the Jacobian (W/β) diag(φ′) (β V), so that β only has to be the same twice.
    """
    w_in, b_in, w_out = (cast(w, dtype).double() for w in fold(weights))
    sharpness = weights.sharpness.detach().double()
    width = weights.w_in.shape[-2]
    by_lag = w_in / sharpness
    return FeedForwardWeights(
        w_in=by_lag[:width],
        b_in=b_in / sharpness,
        w_out=w_out * sharpness[:, None],
        sharpness=sharpness,
        w_past=by_lag[width:],
    )


def slopes(
    x: Float[Tensor, "*batch tokens width"], weights: FeedForwardWeights, activation: Activation
) -> Float[Tensor, "*batch tokens hidden"]:
    """φ′ of every hidden unit at X."""
    return activation_slope(activation, sharpened(x, weights))


def sharpened(
    x: Float[Tensor, "*batch tokens width"], weights: FeedForwardWeights
) -> Float[Tensor, "*batch tokens hidden"]:
    """β h of every hidden unit at X."""
    return (windows(x, weights.kernel) @ weights.joined() + weights.b_in) * weights.sharpness


def feed_forward_jacobian(
    x: Float[Tensor, "*batch tokens width"],
    slope: Float[Tensor, "*batch tokens hidden"],
    weights: FeedForwardWeights,
) -> LinearMap:
    """J = W₁ diag(φ′) W₂ in row convention, with a further such term for every earlier token."""
    w_in, w_out, kernel = weights.joined(), weights.w_out, weights.kernel
    return LinearMap(
        jvp=lambda dx: ((windows(dx, kernel) @ w_in) * slope) @ w_out,
        vjp=lambda dy: windows_adjoint(((dy @ w_out.mT) * slope) @ w_in.mT, kernel),
        shape=x.shape,
        dtype=x.dtype,
        device=x.device,
    )


def activation_slope(activation: Activation, h: Tensor) -> Tensor:
    """φ′(h), entry by entry."""
    match activation:
        case "silu":
            gate = torch.sigmoid(h)
            return gate * (1 + h * (1 - gate))
        case "gelu":
            density = torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)
            return torch.special.ndtr(h) + h * density
        case "relu":
            return (h > 0).to(h.dtype)
        case "tanh":
            return 1 - torch.tanh(h).square()
