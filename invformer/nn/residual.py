"""Residual layers y = x + f(x) that can be undone, and blocks of them."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.nn.activation_norm import ActivationNorm, ChannelAffine
from invformer.nn.branch import LipschitzBranch, exact_copy
from invformer.nn.channel_metric import ChangeOfMetric, ChannelMetric
from invformer.numerics.ball import into_ball
from invformer.numerics.error_bound import output_rounding
from invformer.numerics.fixed_point import FixedPointSolution, invert_residual
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Norm
from invformer.numerics.precision import has_autocast


class InvertibleResidual(nn.Module):
    """y = x + f(x) with Lip(f) ≤ c < 1: a bijection (Behrmann et al. 2019, Theorem 1).

    With a radius R the branch sees ψ_R(x) = x/√(1 + ‖x‖²/R²) of every token, and y = x + f(ψ_R(x)).
    ψ_R is 1-Lipschitz, so every constant of f holds as it is, and what the branch adds is bounded:
    activations can no longer multiply from block to block (docs/numerics.md).

    Args:
        branch: the contraction f.
        input_radius: R > 0; None shows the branch x itself.
    """

    def __init__(self, branch: LipschitzBranch, input_radius: float | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.input_radius = input_radius

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """x + f(ψ_R(x))."""
        return x + self.added(x)

    def added(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """f(ψ_R(x)), what the layer adds."""
        return self.branch(self.seen(x))

    def seen(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """ψ_R(x), what the branch sees."""
        return x if self.input_radius is None else into_ball(x, self.input_radius)

    def in_metric(
        self, x: Float[Tensor, "*batch tokens width"], metric: ChannelMetric
    ) -> Float[Tensor, "*batch tokens width"]:
        """x + D⁻¹ f(ψ_R(D x + b)), with the D and b of a metric."""
        if self.input_radius is not None:
            return x + self.added(metric(x)) * (-metric.log_scale).exp()
        return x + self.branch.in_metric(x, metric)

    def exact(self) -> SequenceMap:
        """f ∘ ψ_R in float64."""
        branch = exact_copy(self.branch)
        return lambda x: branch(self.seen(x))

    def lipschitz_bound(self, norm: Norm, dtype: torch.dtype | None = None) -> float:
        """A proven upper bound on Lip(f ∘ ψ_R) in ``norm``, for the weights as cast to ``dtype``.

        Raises:
            ValueError: there is a radius and ``norm`` is entry_max, in which ψ_R does expand.
        """
        if self.input_radius is not None and norm == "entry_max":
            raise ValueError("no bound in entry_max is known with an input_radius")
        return self.branch.lipschitz_bound(norm, dtype)

    def inverse(
        self, y: Float[Tensor, "*batch tokens width"], **options: Any
    ) -> FixedPointSolution:
        """The x with x + f(x) = y, and the evidence for it.

        Args:
            y: what the layer put out.
            options: passed to :func:`invformer.numerics.fixed_point.invert_residual`.
        """
        return invert_residual(
            self.added,
            y,
            residual_map=self.exact() if options.get("evidence", True) else None,
            inner_size=self.branch.inner_size(options["norm"], y.shape[-2]),
            token_wise=self.branch.is_token_wise,
            **options,
        )

    def rounding(
        self,
        x: Float[Tensor, "samples tokens width"],
        y: Float[Tensor, "samples tokens width"],
        norm: Norm,
    ) -> Float[Tensor, "samples"]:
        """≥ ‖y − (x + f(x))‖ for the y that the forward pass makes of x, by the rounding model."""
        inner_size = self.branch.inner_size(norm, y.shape[-2])
        return output_rounding(self.added, x, y, self.exact(), norm, inner_size)


class InvertibleBlock(nn.Module):
    """x ↦ x + attention(x), normalise, x ↦ x + feed_forward(x), normalise.

    Args:
        attention: contractive attention branch.
        feed_forward: contractive feed-forward branch.
        d_model: width, for the two normalisations; None leaves them out.
        input_radius: of both residual layers.
    """

    def __init__(
        self,
        attention: LipschitzBranch,
        feed_forward: LipschitzBranch,
        d_model: int | None,
        input_radius: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = InvertibleResidual(attention, input_radius)
        self.attention_norm = None if d_model is None else ActivationNorm(d_model)
        self.feed_forward = InvertibleResidual(feed_forward, input_radius)
        self.feed_forward_norm = None if d_model is None else ActivationNorm(d_model)

    def layers(self) -> Iterator[tuple[str, InvertibleResidual | ChannelAffine]]:
        """The layers by name, in the order they act."""
        for name, layer in self.named_children():
            assert isinstance(layer, InvertibleResidual | ActivationNorm)
            yield name, layer

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply the layers in order."""
        for _, layer in self.layers():
            x = layer(x)
        return x

    @torch.no_grad()
    def initialise(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Initialise the normalisations from a batch; what then leaves the block."""
        for _, layer in self.layers():
            if isinstance(layer, ActivationNorm):
                layer.initialise(x)
            x = layer(x)
        return x


class MetricBlock(InvertibleBlock):
    """x ↦ x + D⁻¹ attention(D x + b), x ↦ x + D⁻¹ feed_forward(D x + b), D and b of each its own.

    Each branch contracts in a metric of its own (:class:`.channel_metric.ChannelMetric`). What goes
    from branch to branch is the stream in the coordinates of the next one, by one affine map.

    Args:
        attention: contractive attention branch.
        feed_forward: contractive feed-forward branch.
        d_model: width.
        loud: channels that the attention and that the feed-forward write loudly to at first.
        input_radius: of both residual layers.
    """

    def __init__(
        self,
        attention: LipschitzBranch,
        feed_forward: LipschitzBranch,
        d_model: int,
        loud: tuple[Tensor, Tensor],
        input_radius: float | None = None,
    ) -> None:
        super().__init__(attention, feed_forward, None, input_radius)
        self.attention_metric = ChannelMetric(d_model, loud[0])
        self.feed_forward_metric = ChannelMetric(d_model, loud[1])
        self.enter = ChangeOfMetric(None, self.attention_metric)
        self.between = ChangeOfMetric(self.attention_metric, self.feed_forward_metric)
        self.leave = ChangeOfMetric(self.feed_forward_metric, None)

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply the layers in order; where gradients are wanted, metrics folded into weights.

        Certificates, estimates and inversion are about the layers, weights and rounding as they
        are; gradients are those of the same function, for less.
        """
        if not self.is_folded(x):
            return super().forward(x)
        x = self.attention.in_metric(x, self.attention_metric)
        return self.feed_forward.in_metric(x, self.feed_forward_metric)

    def is_folded(self, x: Tensor) -> bool:
        """Whether a forward pass of x runs in folded weights: frozen ones are taken as they are."""
        frozen = self.attention.branch.is_frozen or self.feed_forward.branch.is_frozen
        return torch.is_grad_enabled() and not frozen and not has_autocast(x.device)

    def metrics(self) -> Iterator[tuple[InvertibleResidual, ChannelMetric]]:
        """Both residual layers, and the metric of each."""
        yield self.attention, self.attention_metric
        yield self.feed_forward, self.feed_forward_metric

    def layers(self) -> Iterator[tuple[str, InvertibleResidual | ChannelAffine]]:
        """The layers by name, in the order they act."""
        for name in ("enter", "attention", "between", "feed_forward", "leave"):
            layer = getattr(self, name)
            assert isinstance(layer, InvertibleResidual | ChangeOfMetric)
            yield name, layer

    @torch.no_grad()
    def initialise(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Initialise both metrics from a batch; what then leaves the block."""
        self.attention_metric.initialise_for(self.attention.added, x)
        u = self.attention(self.enter(x))
        x = ChangeOfMetric(self.attention_metric, None)(u)
        self.feed_forward_metric.initialise_for(self.feed_forward.added, x)
        return self.leave(self.feed_forward(self.between(u)))
