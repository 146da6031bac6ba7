"""The residual branches of a stack at a text, those of one kind and shape stacked.

Everything here has a leading dimension of branches: one launch serves all of them, at any depth.
Products with a Jacobian take a further dimension after the sequences, of K vectors.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.kernels.attention import only
from invformer.nn.branch import LipschitzBranch
from invformer.nn.feed_forward import ACTIVATIONS, FeedForward, activation_slope
from invformer.nn.residual import ResidualWeights
from invformer.nn.transformer import PreNormBranch
from invformer.numerics.ball import into_ball, to_ball
from invformer.numerics.linear_map import LinearMap, SequenceMap, linearise
from invformer.numerics.token_shift import windows, windows_adjoint

Branch = LipschitzBranch | PreNormBranch
# Output tokens, one for each vector.
Chosen = Integer[Tensor, "branches sequences K"]


def acts_per_token(branch: Branch) -> bool:
    """Whether f acts token by token."""
    if isinstance(branch, LipschitzBranch):
        return branch.is_token_wise
    return isinstance(branch.inner, FeedForward) and branch.inner.kernel == 1


class StackedBranches:
    """Branches f of one kind, each at an input of its own: their outputs, then their Jacobians.

    :meth:`forward` is called for one layer after the other. This class differentiates any branches
    automatically; the others know the products of theirs.

    Args:
        branches: of one kind and shape.
        layers: the weights of their residual layers. Those of D⁻¹ f(D ·), D folded in, have the
            Jacobian D⁻¹ J D; the products below are with J.
        num_tokens: N.
        input_radius: R, if the branches see ψ_R(u) instead of u.
        scale: D of each layer, if it is folded in.
    """

    def __init__(
        self,
        branches: Sequence[Any],
        layers: Sequence[ResidualWeights],
        num_tokens: int,
        input_radius: float | None = None,
        scale: Float[Tensor, "branches width"] | None = None,
    ) -> None:
        self.branches, self.layers, self.num_tokens = branches, layers, num_tokens
        self.weights = [layer.branch for layer in layers]
        self.input_radius, self.scale = input_radius, scale
        centres = [layer.centre for layer in layers if layer.centre is not None]
        self.centre = torch.stack(centres).unsqueeze(1) if centres else None
        self.inputs: list[Tensor] = []  # D x + b of each, or x where D is folded in
        self.points: list[tuple[Tensor, ...]] = []

    def forward(self, x: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """x + D⁻¹ f(ψ_R(D x + b)) of the next layer."""
        index = len(self.inputs)
        u = self.enter(x)
        u = u if self.centre is None else u + self.centre[index]
        return x + self.layers[index].leave(self.branches[index](u, self.weights[index]))

    def enter(self, x: Tensor) -> Tensor:
        """What the next branch sees, less the centre where D is folded in."""
        scaling = self.layers[len(self.inputs)].scaling
        self.inputs.append(x if scaling is None else scaling.apply(x))
        return self.seen(self.inputs[-1])

    def leave(self, x: Tensor, hidden: Tensor, w_out: Tensor) -> Tensor:
        """x + D⁻¹ h W of the layer that was entered."""
        layer = self.layers[len(self.inputs) - 1]
        if layer.scaling is None:
            return plus_product(x.flatten(0, -2), hidden, w_out)
        return x + layer.leave(hidden @ w_out)

    def seen(self, u: Tensor) -> Tensor:
        """ψ_R(u)."""
        return u if self.input_radius is None else into_ball(u, self.input_radius)

    def evidence(self) -> list[Tensor]:
        """What derivatives and local bounds are made of, branch first."""
        return [torch.stack(each) for each in zip(*self.points, strict=True)]

    def whole(self, num_vectors: int = 1) -> LinearMap:
        """J; vectors are (branches, sequences, K, N, D)."""
        u = torch.stack(self.inputs)
        u = self.seen(u if self.centre is None else u + self.centre.unsqueeze(1)).unsqueeze(2)
        with only("math"):  # fused attention has no second derivative
            j = linearise(self.together, u.expand(-1, -1, num_vectors, -1, -1))
        return self.of_inputs(self.unfolded(j))

    def together(self, u: Float[Tensor, "branches *batch tokens width"]) -> Tensor:
        """All branches, each at inputs of its own."""
        each = zip(self.branches, u, self.weights, strict=True)
        return torch.stack([branch(at, weights) for branch, at, weights in each])

    def rows(self, chosen: Chosen) -> LinearMap:
        """The rows J_i· = ∂f_i/∂X of K output tokens i.

        They map (branches, sequences, K, N, D) to (branches, sequences, K, D).
        """
        whole, here = self.whole(chosen.shape[-1]), self.marked(chosen)
        return replace(
            whole,
            jvp=lambda dx: (whole.jvp(dx) * here).sum(-2),
            vjp=lambda dy: whole.vjp(dy.unsqueeze(-2) * here),
        )

    def diagonal(self) -> LinearMap:
        """The diagonal blocks ∂f_i/∂x_i, as one map."""
        raise NotImplementedError(f"no diagonal blocks of {type(self.branches[0]).__name__}")

    def marked(self, chosen: Chosen) -> Float[Tensor, "branches sequences K tokens 1"]:
        """One at the chosen token."""
        here = chosen.unsqueeze(-1) == torch.arange(self.num_tokens, device=chosen.device)
        return here.to(self.inputs[0].dtype).unsqueeze(-1)

    def of_inputs(self, j: LinearMap) -> LinearMap:
        """The Jacobian of f ∘ ψ_R at u from that of f at ψ_R(u)."""
        if self.input_radius is None:
            return j
        u = torch.stack(self.inputs).unsqueeze(2)
        return between(lambda y: y, j, to_ball(u / self.input_radius).derivative)

    def unfolded(self, j: LinearMap) -> LinearMap:
        """D J D⁻¹, if D is folded in."""
        if self.scale is None:
            return j
        d = self.scale[:, None, None, None]
        return between(lambda y: y * d, j, lambda x: x / d)

    def linear(self, push: SequenceMap, pull: SequenceMap) -> LinearMap:
        """A pair of products."""
        x = self.inputs[0]
        shape = torch.Size((len(self.inputs), *x.shape))
        return LinearMap(push, pull, shape, x.dtype, x.device)


class StackedModules(StackedBranches):
    """Modules that hold their parameters, which are stacked."""

    def __init__(self, branches: Sequence[Any], num_tokens: int) -> None:
        super().__init__(branches, [ResidualWeights(None)] * len(branches), num_tokens)
        parameters, buffers = torch.func.stack_module_state(list(branches))
        self.state = {name: t.detach() for name, t in (parameters | buffers).items()}

    def forward(self, x: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """f(x) of the next module, which its block adds to a stream."""
        self.inputs.append(x)
        return self.branches[len(self.inputs) - 1](x)

    def together(self, u: Float[Tensor, "branches *batch tokens width"]) -> Tensor:
        """All modules, each at inputs of its own."""

        def one(state: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.branches[0], state, (x,))

        return torch.func.vmap(one)(self.state, u)


class StackedFeedForward(StackedBranches):
    """φ(x W + b) V, x with the tokens before it where the kernel sees them."""

    def __init__(
        self, branches: Sequence[Any], layers: Sequence[ResidualWeights], *at: Any
    ) -> None:
        super().__init__(branches, layers, *at)
        self.kernel = self.weights[0].kernel
        w_in, b_in, w_out, _ = zip(*self.weights, strict=True)
        self.w_in, self.w_out = torch.stack(w_in), torch.stack(w_out)
        self.bias = torch.stack(b_in).unsqueeze(1)
        if self.centre is not None:
            self.bias = torch.baddbmm(self.bias, self.centre, self.w_in)

    def forward(self, x: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """The layer; x W + b is kept."""
        index = len(self.inputs)
        u = windows(self.enter(x), self.kernel)
        hidden = plus_product(self.bias[index], u, self.w_in[index])
        self.points.append((hidden,))
        activation = ACTIVATIONS[self.branches[0].activation]
        return self.leave(x, activation(hidden), self.w_out[index])

    def evidence(self) -> list[Tensor]:
        """φ′ and the weights."""
        return [self.slopes(), *(torch.stack(each) for each in zip(*self.weights, strict=True))]

    def slopes(self) -> Float[Tensor, "branches sequences tokens hidden"]:
        """φ′ of every hidden unit."""
        (hidden,) = super().evidence()
        return activation_slope(self.branches[0].activation, hidden)

    def whole(self, num_vectors: int = 1) -> LinearMap:
        """Sums over the tokens that a token sees."""
        return self.of_windows(self.kernel)

    def diagonal(self) -> LinearMap:
        """The token itself."""
        return self.of_windows(1)

    def of_windows(self, kernel: int) -> LinearMap:
        """What ``kernel`` tokens do to the row of the last of them."""
        slope, w_out = self.slopes().unsqueeze(2), self.w_out
        w_in = self.w_in[:, : kernel * w_out.shape[-1]]

        def push(dx: Tensor) -> Tensor:
            return by_branch(by_branch(windows(dx, kernel), w_in) * slope, w_out)

        def pull(dy: Tensor) -> Tensor:
            return windows_adjoint(by_branch(by_branch(dy, w_out.mT) * slope, w_in.mT), kernel)

        return self.of_inputs(self.unfolded(self.linear(push, pull)))


def between(left: SequenceMap, j: LinearMap, right: SequenceMap) -> LinearMap:
    """A J B with symmetric A and B."""
    return replace(j, jvp=lambda x: left(j.jvp(right(x))), vjp=lambda y: right(j.vjp(left(y))))


def by_branch(
    x: Float[Tensor, "branches *batch m"], w: Float[Tensor, "branches m n"]
) -> Float[Tensor, "branches *batch n"]:
    """x W of every branch, without a copy of W for every vector and sequence."""
    return torch.bmm(x.flatten(1, -2), w).view(*x.shape[:-1], -1)


def plus_product(
    b: Float[Tensor, "#rows n"], x: Float[Tensor, "*batch m"], w: Float[Tensor, "m n"]
) -> Float[Tensor, "*batch n"]:
    """b + x W of one branch."""
    return torch.addmm(b, x.flatten(0, -2), w).view(*x.shape[:-1], -1)
