"""Feed-forward branches: the ordinary one, and those that contract by construction."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from invformer.bounds import layers, local
from invformer.nn.branch import (
    PER_SPECTRAL_NORM,
    LipschitzBranch,
    affine,
    cast,
    is_affordable,
)
from invformer.nn.channel_metric import Metrics
from invformer.nn.spectral import (
    INITIAL_OUTPUT,
    SpectralNormalised,
    max_row_sum,
    scale_each,
    scaled_weights,
    write_to,
)
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm
from invformer.numerics.rounding import sum_up
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
    """What a contractive feed-forward multiplies by, as (in, out): f(x) = φ(x W + b) V.

    The sharpness β is in all three: W = Ŵ₁β, b = b₁β, V = c Ŵ₂/(lip(φ) β). So it takes no pass over
    tokens, and what is certified is what is multiplied, in any precision. ``w_in`` has D rows for
    each of ``kernel`` tokens: the own one first, then those before, nearest first.
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    sharpness: Tensor

    @property
    def kernel(self) -> int:
        """Tokens that a hidden unit sees: its own and those before."""
        return self.w_in.shape[-2] // self.w_out.shape[-1]


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
    is_token_wise = True
    has_one_local_bound = True

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

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply f to every token."""
        return self.applied(x, self._shared or self.weights())

    def applied(
        self,
        x: Float[Tensor, "*batch tokens width"],
        weights: FeedForwardWeights,
        centre: Float[Tensor, "width"] | None = None,
    ) -> Float[Tensor, "*batch tokens width"]:
        """φ((x + m) W + b) V, φ of hidden units in their place where no gradient needs them."""
        hidden = affine(windows(x, self.kernel), weights.w_in, weights.b_in, centre)
        activation = (ACTIVATIONS if torch.is_grad_enabled() else IN_PLACE)[self.activation]
        return activation(hidden) @ weights.w_out

    @property
    def folds_metrics(self) -> bool:
        """If units see one token: before the first there is D (x + m) = 0, not x = 0."""
        return self.kernel == 1

    def kind(self) -> Hashable:
        """Shape, activation and norm."""
        return type(self), self.w_in.weight.shape, self.activation, self.norm

    @staticmethod
    def forward_weights(
        branches: Sequence["ContractiveFeedForward"], metrics: Metrics | None = None
    ) -> list[FeedForwardWeights]:
        """Ŵ₁β, b₁β, c Ŵ₂/(lip(φ) β) and β of every branch; D Ŵ₁β and c Ŵ₂D⁻¹/(lip(φ) β)."""
        scaled = scaled_weights if branches[0].norm == "spectral" else scaled_by_row_sums
        sharpness = torch.stack([b.log_sharpness for b in branches]).exp()
        scale = torch.stack([b.output_scale() for b in branches])[:, None] / sharpness
        rows = None if metrics is None else metrics.scale[:, :, None]
        columns = None if metrics is None else metrics.inverse[:, None, :]
        w_in = scaled([b.w_in for b in branches], sharpness[:, None, :], rows)
        b_in = torch.stack([b.b_in for b in branches]) * sharpness
        w_out = scaled([b.w_out for b in branches], scale[:, :, None], columns)
        return [
            FeedForwardWeights(*weights)
            for weights in zip(w_in, b_in, w_out, sharpness, strict=True)
        ]

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
        by_lag, w_out = without_sharpness(weights)
        hidden, width = w_out.shape
        work = len(by_lag) * width**2 * (hidden + PER_SPECTRAL_NORM * width)
        tight = tight and is_affordable(x[..., 0].numel(), work)
        bound = local.feed_forward_local_bound if tight else local.feed_forward_fast_bound
        total = torch.stack([bound(slope, w_in, w_out) for w_in in by_lag]).sum(0)
        return total.clamp(max=self.lipschitz_bound(norm))

    def inner_size(self, norm: Norm, num_tokens: int) -> float:
        """‖diag(b) V‖_F of a token: what biases add up to where they do not cancel."""
        weights = self.weights()
        terms = (weights.b_in.detach()[:, None] * weights.w_out.detach()).double()
        per_channel = terms.square().sum(0)
        match norm:
            case "entry_max":
                return per_channel.max().sqrt().item()
            case "token_max":
                return per_channel.sum().sqrt().item()
            case "frobenius":
                return math.sqrt(num_tokens) * per_channel.sum().sqrt().item()

    def bound_by_construction(self, norm: Norm) -> Tensor | None:
        """c in the norms that the normalisation holds."""
        held = ("entry_max",) if self.norm == "entry_max" else ("token_max", "frobenius")
        return self.correction.double() * self.lipschitz_target if norm in held else None

    def lipschitz_bound(self, norm: Norm, dtype: torch.dtype | None = None) -> float:
        """Certified Lip(f) in ``norm`` for the weights as cast to ``dtype``."""
        by_lag, w_out = without_sharpness(self.weights(), dtype)
        return sum_up(
            *(layers.feed_forward_bound(w_in, w_out, self.activation, norm) for w_in in by_lag)
        )


def scaled_by_row_sums(
    weights: Sequence[SpectralNormalised],
    factors: Float[Tensor, "weights #rows #columns"],
    further: Float[Tensor, "weights #rows #columns"] | None = None,
) -> list[Float[Tensor, "rows columns"]]:
    """W · factor/‖Wᵀ‖_∞ of several weights: what holds a constant in entry_max."""
    tiny = torch.finfo(weights[0].weight.dtype).tiny
    sums = [max_row_sum(w.weight.mT).clamp_min(tiny) for w in weights]
    scales = factors / torch.stack(sums)[:, None, None]
    return list(scale_each([w.weight for w in weights], scales, further))


def without_sharpness(
    weights: FeedForwardWeights, dtype: torch.dtype | None = None
) -> tuple[list[Float[Tensor, "width hidden"]], Float[Tensor, "hidden width"]]:
    """W₁ of every lag and W₂ of what runs in ``dtype``: cast first, then β taken out in float64.

    φ(x W + b) V has the Jacobian (W/β) diag(φ′) (βV), so that β only has to be the same twice. W₂
    is lifted by what division and product round: norms of these bound those in real numbers.
    """
    w_in, w_out = (cast(w, dtype).double() for w in (weights.w_in, weights.w_out))
    sharpness = weights.sharpness.detach().double()
    by_lag = (w_in / sharpness).split(w_out.shape[-1], dim=-2)
    return list(by_lag), w_out * (UNFOLDING * sharpness)[:, None]


def slopes(
    x: Float[Tensor, "*batch tokens width"], weights: FeedForwardWeights, activation: Activation
) -> Float[Tensor, "*batch tokens hidden"]:
    """φ′ of every hidden unit at X."""
    return activation_slope(activation, sharpened(x, weights))


def sharpened(
    x: Float[Tensor, "*batch tokens width"], weights: FeedForwardWeights
) -> Float[Tensor, "*batch tokens hidden"]:
    """β h of every hidden unit at X."""
    return windows(x, weights.kernel) @ weights.w_in + weights.b_in


def feed_forward_jacobian(
    x: Float[Tensor, "*batch tokens width"],
    slope: Float[Tensor, "*batch tokens hidden"],
    weights: FeedForwardWeights,
) -> LinearMap:
    """J = W₁ diag(φ′) W₂ in row convention, with a further such term for every earlier token."""
    w_in, w_out, kernel = weights.w_in, weights.w_out, weights.kernel
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
