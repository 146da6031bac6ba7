"""Feed-forward maps: the ordinary one, and one that contracts by construction."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from invformer.branches.branch import AttentionCache, LipschitzBranch, cast, weights_together
from invformer.branches.feed_forward import bounds as layers
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

Activation = Literal["silu", "gelu", "relu", "tanh"]
# Spectral normalisation leaves pre-activations small; without this every unit starts out linear.
INITIAL_SHARPNESS = 8.0
# Taking β out again rounds every entry by 2⁻⁵³ of itself, and ‖·‖₂ by √rank times that.
UNFOLDING = 1 + 2.0**-40
# Pre-activations of earlier tokens' unit-variance channels, at first.
INITIAL_PAST = 0.5
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}
MODULES = {"silu": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}
# The same, written over their argument: new memory costs more than the function.
IN_PLACE = {name: getattr(torch.ops.aten, f"{name}_") for name in ACTIVATIONS}


class FeedForward(nn.Sequential):
    """x_i ↦ W₂ φ(Σ_{l=0}^{k−1} V_l x_{i−l} + b₁) + b₂, unconstrained.

    ``d_ff`` hidden units with activation φ see k = ``kernel`` tokens: their own and those before.
    """

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation = "gelu", kernel: int = 1
    ) -> None:
        super().__init__(nn.Linear(d_model, d_ff), MODULES[activation](), nn.Linear(d_ff, d_model))
        self.activation: Activation = activation
        self.kernel = kernel
        self.is_token_wise = kernel == 1
        if kernel > 1:
            self[0] = nn.Linear(kernel * d_model, d_ff)

    def forward(self, input: Tokens) -> Tokens:
        """f of every token and the k − 1 tokens before it."""
        return super().forward(windows(input, self.kernel))

    def next_outputs(self, x: Tokens, past: AttentionCache) -> Tokens:
        """As :meth:`.LipschitzBranch.next_outputs`, with the weights of this module."""
        return self(with_past(x, self.kernel, past))[..., -x.shape[-2] :, :]


class FeedForwardWeights(NamedTuple):
    """The weights of f(X) = φ(X W + b) V, every constant multiplied in.

    The sharpness β is in all three: W = Ŵ₁β, b = b₁β, V = c Ŵ₂/(lip(φ) β). So it costs no pass over
    the tokens.

    Attributes:
        w_in: W as (k D, hidden): D rows for each of k tokens, a token's own first, then those
            before, nearest first.
        b_in: b as (hidden,).
        w_out: V as (hidden, D).
        sharpness: β as (hidden,).
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    sharpness: Tensor

    @property
    def kernel(self) -> int:
        """k, as of :class:`FeedForward`."""
        return self.w_in.shape[-2] // self.w_out.shape[-1]


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
        self.is_token_wise = kernel == 1
        # Before the first token there is x + m = 0 where scalings are folded in, but x = 0.
        self.folds_scaling = kernel == 1
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

    def next_outputs(
        self, x: Tokens, past: AttentionCache, weights: FeedForwardWeights | None = None
    ) -> Tokens:
        """As :meth:`.LipschitzBranch.next_outputs`, of new tokens and the k − 1 before."""
        return self(with_past(x, self.kernel, past), weights)[..., -x.shape[-2] :, :]

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
        scale = (per_slope / layers.ACTIVATION_SLOPE[first.activation])[:, None] / sharpness
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
        of_lags = [layers.feed_forward_bounds(w_in, w_out, activation, norm) for w_in in by_lag]
        return list(map(sum_up, *of_lags))


def without_sharpness(
    weights: FeedForwardWeights, dtype: torch.dtype | None = None
) -> tuple[list[Float[Tensor, "*layers width hidden"]], Float[Tensor, "*layers hidden width"]]:
    """W₁ of every lag and W₂ as cast to ``dtype``, with β taken out in float64.

    φ(x W + b) V has the Jacobian (W/β) diag(φ′) (βV) for any β. W₂ is enlarged by the rounding of
    division and product.
    """
    w_in, w_out = (cast(w, dtype).double() for w in (weights.w_in, weights.w_out))
    sharpness = weights.sharpness.detach().double()
    by_lag = (w_in / sharpness.unsqueeze(-2)).split(w_out.shape[-1], dim=-2)
    return list(by_lag), w_out * (UNFOLDING * sharpness).unsqueeze(-1)


def with_past(x: Tokens, kernel: int, past: AttentionCache) -> Float[Tensor, "*batch longer width"]:
    """New tokens behind the k − 1 tokens before them, as far as there are any in ``past``."""
    if kernel == 1:
        return x
    (seen,) = past.append(x)
    return seen[..., -(x.shape[-2] + kernel - 1) :, :]


def activation_slope(activation: Activation, h: Tensor) -> Tensor:
    """φ′(h), entry by entry."""
    match activation:
        case "silu":
            return torch.ops.aten.silu_backward(h.new_ones(1), h)
        case "gelu":
            density = torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)
            return torch.special.ndtr(h) + h * density
        case "relu":
            return (h > 0).to(h.dtype)
        case "tanh":
            return 1 - torch.tanh(h).square()
