"""Residual layers y = x + D⁻¹ f(D x + b) that can be undone, and blocks of them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches.branch import AttentionCache, LipschitzBranch, bounds_together
from invformer.nn.inverse import warn_of_failures, with_gradients
from invformer.numerics.ball import into_ball
from invformer.numerics.error_bound import residual_step, scale_step, stack_error_bound
from invformer.numerics.fixed_point import (
    FixedPointSolution,
    invert_residual,
    require_invertible,
)
from invformer.numerics.norms import Norm, Tokens
from invformer.numerics.residual_equation import Kind
from invformer.numerics.transposed import solve_transposed
from invformer.weights.affine import in_two_formats
from invformer.weights.dropout import Dropout
from invformer.weights.scaling import (
    ActivationNorm,
    DiagonalScaling,
    ScalingWeights,
    scalings_together,
)


class ResidualWeights(NamedTuple):
    """The weights of y = x + D⁻¹ f(D x + b).

    Attributes:
        branch: weights of f.
        scaling: D and b; None if there are none.
    """

    branch: Any
    scaling: ScalingWeights | None = None

    def scale_input(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """u = D x + b."""
        return x if self.scaling is None else self.scaling.apply(x)

    def require_format_of(self, y: Tensor) -> None:
        """Raise ValueError unless y can be inverted, in the format of these weights."""
        require_invertible(y, None)
        for w in self.branch:
            if w.dtype != y.dtype:
                raise ValueError(
                    f"y is in {y.dtype}, the weights are in {w.dtype}: convert one of them"
                )

    def unscale_output(self, f: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """D⁻¹ f."""
        return f if self.scaling is None else f * self.scaling.inverse


class FoldedWeights(NamedTuple):
    """The weights of y = x + g(x + m), g = D⁻¹ f(D ·), m = D⁻¹ b: the same function in less passes.

    They are for a training step and its estimates. Constants and the inverse are those of f.
    """

    folded_branch: Any
    centre: Float[Tensor, "width"]

    def scale_input(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """x + m."""
        return x + self.centre

    def unscale_output(self, f: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The output of g, as it is."""
        return f


class InvertibleResidual(nn.Module):
    """y = x + D⁻¹ f(D x + b) with Lip(f) ≤ c < 1: a bijection (Behrmann et al. 2019, Theorem 1).

    Its inverse solves u + f(u) = D y + b for u, and x = D⁻¹(u − b). The layer contracts in the
    weighted norm ‖D x‖, in which c and the residual of a solution are stated.

    With a radius R the branch sees ψ_R(u) = u/√(1 + ‖u‖²/R²) of every token instead of u. ψ_R is
    1-Lipschitz, so every constant of f still holds, and the output of the branch is bounded
    (docs/numerics.md §17).

    In training mode dropout acts on D⁻¹f. Constants, certificates, estimates and the inverse are
    those of the layer without it, which is what eval mode computes.

    Args:
        scaling: D and b; None is D = I and b = 0.
        input_radius: R > 0; None shows the branch u itself.
        dropout: probability.
    """

    def __init__(
        self,
        branch: LipschitzBranch,
        scaling: DiagonalScaling | None = None,
        input_radius: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.branch = branch
        self.scaling = scaling
        self.input_radius = input_radius
        self.dropout = Dropout(dropout) if dropout else nn.Identity()

    def forward(
        self,
        x: Tokens,
        weights: ResidualWeights | FoldedWeights | None = None,
        folded: bool = False,
    ) -> Tokens:
        """x + D⁻¹ f(ψ_R(D x + b)); without ``weights`` it computes them, ``folded`` or not."""
        if weights is None:
            (weights,) = self.weights_of([self], folded)
        if isinstance(weights, FoldedWeights):
            x, seen = in_two_formats(x)
            return x + self.dropout(self.branch(seen, *weights))
        u = weights.scale_input(x)  # D x + b
        f = weights.unscale_output(self.f(u, weights.branch))
        return x + self.dropout(f)  # x + D⁻¹ f(ψ_R(u))

    def f(self, u: Tokens, weights: Any = None) -> Tokens:
        """f(ψ_R(u)), with weights of the branch."""
        return self.branch(into_ball(u, self.input_radius), weights)

    def next_outputs(self, u: Tokens, past: AttentionCache, weights: Any = None) -> Tokens:
        """f of the tokens after those in ``past``, as :meth:`.Branch.next_outputs`."""
        return self.branch.next_outputs(into_ball(u, self.input_radius), past, weights)

    def weights(self) -> ResidualWeights:
        """The weights as they are now."""
        (weights,) = self.weights_of([self])
        assert isinstance(weights, ResidualWeights)
        return weights

    def group(self) -> Hashable:
        """Layers of one group share :meth:`weights_of`; None: each on its own."""
        group = self.branch.group()
        return group and (group, self.scaling is None, self.input_radius is None)

    @staticmethod
    def weights_of(
        layers: Sequence["InvertibleResidual"], folded: bool = False
    ) -> Sequence[ResidualWeights | FoldedWeights]:
        """The weights of several layers of one group; ``folded`` if that is asked and possible."""
        first, branches = layers[0], [layer.branch for layer in layers]
        scalings = [layer.scaling for layer in layers if layer.scaling is not None]
        if not scalings:
            return [ResidualWeights(w) for w in first.branch.weights_of(branches)]
        stacked = scalings_together(scalings)
        if folded and first.branch.folds_scaling and first.input_radius is None:
            centres = stacked.shift * stacked.inverse
            return list(map(FoldedWeights, first.branch.weights_of(branches, stacked), centres))
        return list(map(ResidualWeights, first.branch.weights_of(branches), stacked.unbind()))

    @staticmethod
    def proven_bounds(
        layers: Sequence["InvertibleResidual"],
        norm: Norm,
        kind: Kind,
        dtype: torch.dtype | None,
        weights: Sequence[Any],
    ) -> list[float]:
        """Proven bounds on Lip(f ∘ ψ_R), or on diagonal blocks, of several layers of one group.

        They hold for the weights of the branches as cast. ValueError with a radius in entry_max, in
        which ψ_R does expand.
        """
        if kind == "global" and norm == "entry_max" and layers[0].input_radius is not None:
            raise ValueError("no bound in entry_max is known with an input_radius")
        return bounds_together([layer.branch for layer in layers], norm, kind, dtype, weights)

    def inverse(
        self,
        y: Tokens,
        weights: ResidualWeights | None = None,
        *,
        lipschitz_bound: float | None = None,
        norm: Norm = "token_max",
        kind: Kind = "global",
        **options: Any,
    ) -> FixedPointSolution:
        """The x with x + D⁻¹ f(D x + b) = y, and the evidence for it.

        u ← v − f(u) for v = D y + b, until v − u − f(u) is within tolerance; then x = D⁻¹(u − b).
        ``error_bound`` is one on ‖x̂ − x‖ in ``norm``, ``residual`` is weighted. The value has
        implicit gradients of y and of every parameter (:mod:`invformer.nn.inverse`): their solver
        has the tolerance of this one, and warns where it fails if ``throw`` is False.

        Args:
            weights: of the layer; None computes them.
            lipschitz_bound: proven c in ``norm``; None proves it.
            options: of :func:`invformer.numerics.fixed_point.invert_residual`, as norm and kind.

        Raises:
            FixedPointError: the solver failed, unless ``throw=False``.
            ValueError: c is not below one, or y is empty or not in
                their format.
        """
        weights = weights or self.weights()
        weights.require_format_of(y)
        c = lipschitz_bound
        if c is None:
            with torch.no_grad():
                (c,) = self.proven_bounds([self], norm, kind, None, [weights.branch])
        if not c < 1:
            raise ValueError(f"no inverse: the bound of f is {c:.3g} ≥ 1 in {norm}")
        solution = self._solve(y.detach(), weights, c, norm, kind, options)
        common = {"lipschitz_bound": c, "norm": norm, "kind": kind, **options}
        x = with_gradients(solution.value, y, [(self, weights, common)])
        return replace(solution, value=x)

    @torch.no_grad()
    def _solve(
        self,
        y: Tokens,
        weights: ResidualWeights,
        c: float,
        norm: Norm,
        kind: Kind,
        options: Mapping[str, Any],
    ) -> FixedPointSolution:
        """As :meth:`inverse`, without gradients."""
        f_in_double = None
        if options.get("evidence", True):
            in_double = (w.detach().double() for w in weights.branch)
            f_in_double = partial(self.f, weights=type(weights.branch)(*in_double))
        solution = invert_residual(
            partial(self.f, weights=weights.branch),
            weights.scale_input(y),
            lipschitz_bound=c,
            norm=norm,
            kind=kind,
            residual_map=f_in_double,
            inner_size=self.branch.inner_size(norm, y.shape[-2], weights.branch),
            token_wise=self.branch.is_token_wise,
            **options,
        )
        steps = (residual_step(solution.error_bound, c),)
        if weights.scaling is None:
            return replace(solution, error_steps=steps)
        u = solution.value
        log_scale, _, inverse, shift = weights.scaling
        outer = scale_step(y, -log_scale, -shift * inverse, norm)  # y = D⁻¹(v − b), undone
        steps = (outer, *steps, scale_step(u, log_scale, shift, norm))  # u = D x + b, undone
        error = stack_error_bound(steps).expand(y.shape[:-2])
        x = weights.scaling.undo(u)
        return replace(solution, value=x, error_bound=error, error_steps=steps)

    def transposed(
        self,
        x: Tokens,
        weights: ResidualWeights,
        v: Tokens,
        *,
        lipschitz_bound: float,
        norm: Norm,
        kind: Kind,
        rtol: float | None = None,
        max_steps: int | None = None,
        throw: bool = True,
        **options: Any,
    ) -> tuple[Tokens, Tokens]:
        """y = x + D⁻¹ f(D x + b), recorded, and the w with (∂y/∂x)ᵀ w = v: D⁻¹w + JᵀD⁻¹w = D⁻¹v."""
        u = weights.scale_input(x)
        fu = self.f(u, weights.branch)
        solution = solve_transposed(
            lambda w: torch.autograd.grad(fu, u, w, retain_graph=True)[0],
            weights.unscale_output(v).detach(),
            lipschitz_bound=lipschitz_bound,
            norm=norm,
            kind=kind,
            rtol=rtol,
            max_steps=max_steps,
            throw=throw,
        )
        warn_of_failures(solution)
        w = solution.value
        scaled = w if weights.scaling is None else w * weights.scaling.scale.detach()
        return x + weights.unscale_output(fu), scaled

    @torch.no_grad()
    def initialise(self, x: Tokens) -> None:
        """Set D and b, if there are any, from a batch."""
        if self.scaling is not None:
            self.scaling.initialise_for(self.f, x)


class InvertibleBlock(nn.Module):
    """x ↦ x + attention(x), normalise, x ↦ x + feed_forward(x), normalise.

    Args:
        d_model: width, for the two normalisations; None leaves them out.
        input_radius: of both residual layers.
        scalings: of the attention's layer and of the feed-forward's.
        dropout: of both residual layers.
    """

    def __init__(
        self,
        attention: LipschitzBranch,
        feed_forward: LipschitzBranch,
        d_model: int | None = None,
        input_radius: float | None = None,
        scalings: tuple[DiagonalScaling | None, DiagonalScaling | None] = (None, None),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = InvertibleResidual(attention, scalings[0], input_radius, dropout)
        self.attention_norm = None if d_model is None else ActivationNorm(d_model)
        self.feed_forward = InvertibleResidual(feed_forward, scalings[1], input_radius, dropout)
        self.feed_forward_norm = None if d_model is None else ActivationNorm(d_model)

    def layers(self) -> Iterator[tuple[str, InvertibleResidual | ActivationNorm]]:
        """The layers by name, in the order they act."""
        for name, layer in self.named_children():
            assert isinstance(layer, InvertibleResidual | ActivationNorm)
            yield name, layer

    def forward(
        self, x: Tokens, weights: Mapping[str, Any] | None = None, folded: bool = False
    ) -> Tokens:
        """Apply the layers in order, with their weights by name; None computes them here."""
        for name, layer in self.layers():
            own = None if weights is None else weights[name]
            x = layer(x, own, folded) if isinstance(layer, InvertibleResidual) else layer(x, own)
        return x
