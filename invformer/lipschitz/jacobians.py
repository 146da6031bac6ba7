"""The residual branches of a stack at a text, those of one kind and shape stacked.

Everything here has a leading dimension of branches: one launch serves all of them, at any depth.
Products with a Jacobian take a further dimension after the sequences, of several vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.kernels.attention import only
from invformer.kernels.blocked import toeplitz
from invformer.nn.attention import L2Weights, TiedL2Attention, merge_heads, split_heads
from invformer.nn.bounded_attention import (
    BoundedAttention,
    BoundedWeights,
    merge,
    split,
)
from invformer.nn.branch import LipschitzBranch
from invformer.nn.feed_forward import (
    ACTIVATIONS,
    ContractiveFeedForward,
    FeedForward,
    FeedForwardWeights,
    activation_slope,
)
from invformer.nn.position_bias import CausalMask
from invformer.nn.residual import InvertibleResidual
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import CharTransformer, PreNormBlock, PreNormBranch
from invformer.numerics import bounded_attention as bounded_core
from invformer.numerics import l2_attention as core
from invformer.numerics.ball import BallPoint
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.numerics.token_shift import windows, windows_adjoint

Branch = LipschitzBranch | PreNormBranch


@dataclass(frozen=True)
class Jacobians:
    """The Jacobians of branches of one kind, at an input of each.

    Attributes:
        whole: ∂f/∂X; vectors are (branches, sequences, K, N, D).
        diagonal: its diagonal blocks ∂f_i/∂x_i as one map; None where nobody wrote them down.
        at: what local bounds are made of; None where there are none.
    """

    whole: LinearMap
    diagonal: LinearMap | None = None
    at: Any = None


class Stacked(Protocol):
    """Branches of one kind with the weights they have now, with a leading dimension of branches."""

    def apply(self, x: Tensor, members: slice) -> tuple[Tensor, Callable[[int], Jacobians]]:
        """f(x) of some members, and how to get the Jacobians there for so many vectors."""
        ...


def residual_branches(
    model: CharTransformer,
    x: Float[Tensor, "*batch tokens width"],
    weights: StackWeights | None = None,
) -> Iterator[tuple[str, Branch, Tensor]]:
    """Every residual branch with its name and what it sees, for the stack's input x."""
    if isinstance(model.stack, InvertibleStack):
        with torch.no_grad():
            weights = weights or model.stack.weights()
        for name, layer in model.stack.layers():
            if isinstance(layer, InvertibleResidual):
                yield name, layer.branch, layer.seen(weights[name].enter(x))
            x = layer(x, weights[name])
        return
    for index, block in enumerate(model.stack.blocks):
        assert isinstance(block, PreNormBlock)
        for name, branch in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            yield f"block_{index:02d}/{name}", branch, x
            x = x + branch(x)


def kind_of(branch: Branch) -> Any:
    """Branches that agree in this can be stacked."""
    inner = branch.inner if isinstance(branch, PreNormBranch) else branch
    shapes = tuple((name, p.shape) for name, p in branch.named_parameters())
    own = branch.kind() if isinstance(branch, LipschitzBranch) else None
    return type(branch), type(inner), own, shapes, acts_per_token(branch)


def acts_per_token(branch: Branch) -> bool:
    """Whether f acts token by token."""
    if isinstance(branch, LipschitzBranch):
        return branch.is_token_wise
    return isinstance(branch.inner, FeedForward) and branch.inner.kernel == 1


def stacked(branches: Sequence[Any], num_tokens: int) -> Stacked:
    """Branches of one kind with their present weights, for sequences of so many tokens."""
    match branches[0]:
        case TiedL2Attention():
            return StackedL2Attention(branches, num_tokens)
        case BoundedAttention():
            return StackedBoundedAttention(branches, num_tokens)
        case ContractiveFeedForward():
            return StackedFeedForward(branches)
    return StackedModules(branches)


class StackedL2Attention:
    """Σ_h (P^h q^h) G_h with q = X W_h."""

    def __init__(self, branches: Sequence[TiedL2Attention], num_tokens: int) -> None:
        self.weights = L2Weights(*stacked_weights(branches))
        self.query = self.weights.w_q.transpose(-3, -2).flatten(-2)
        self.output = self.weights.g.flatten(-3, -2)
        self.bias = stacked_biases(branches, num_tokens)[:, None]

    def apply(self, x: Tensor, members: slice) -> tuple[Tensor, Callable[[int], Jacobians]]:
        """f(x) of some members, and their Jacobians."""
        query, output, bias = self.query[members], self.output[members], self.bias[members]
        num_heads = self.weights.g.shape[1]
        q = split_heads(by_branch(x, query), num_heads)
        p = core.attention_weights(q, bias)

        def of_heads(jvp: Callable, vjp: Callable) -> LinearMap:
            wide_q, wide_p = q.unsqueeze(2), p.unsqueeze(2)

            def push(dx: Tensor) -> Tensor:
                dq = split_heads(by_branch(dx, query), num_heads)
                return by_branch(merge_heads(jvp(wide_q, wide_p, dq)), output)

            def pull(dy: Tensor) -> Tensor:
                dv = split_heads(by_branch(dy, output.mT), num_heads)
                return by_branch(merge_heads(vjp(wide_q, wide_p, dv)), query.mT)

            return LinearMap(push, pull, x.shape, x.dtype, x.device)

        def jacobians(num_vectors: int) -> Jacobians:
            whole = of_heads(core.l2_attention_jvp, core.l2_attention_vjp)
            diagonal = of_heads(core.own_token_product, core.own_token_product)
            return Jacobians(whole, diagonal, (q, p, self.weights))

        return by_branch(merge_heads(p @ q), output), jacobians


class StackedBoundedAttention:
    """[P_h v_h]_h G, queries, keys and values held in the unit ball."""

    def __init__(self, branches: Sequence[BoundedAttention], num_tokens: int) -> None:
        self.like = branches[0]  # all see the same tokens
        self.weights = BoundedWeights(*stacked_weights(branches))
        self.w_qkv = self.weights.w_qkv.flatten(1, 2).transpose(1, 2).flatten(2)
        self.output = self.weights.g.flatten(-3, -2)
        self.bias = stacked_biases(branches, num_tokens)[:, None].to(self.output)

    def apply(self, x: Tensor, members: slice) -> tuple[Tensor, Callable[[int], Jacobians]]:
        """f(x) of some members, and their Jacobians."""
        like, w_qkv, output = self.like, self.w_qkv[members], self.output[members]
        num_heads = self.weights.g.shape[1]
        z = like.seen(split(by_branch(x, w_qkv), num_heads))
        temperature = self.weights.temperature[members, None]
        at = bounded_core.attention_point(*z, temperature, self.bias[members])

        def of_heads(seen: Callable, jvp: Callable, vjp: Callable, adjoint: Callable) -> LinearMap:
            wide = bounded_core.AttentionPoint(
                *(BallPoint(*(t.unsqueeze(2) for t in point)) for point in at[:3]),
                at.p.unsqueeze(2),
                at.temperature.unsqueeze(2),
            )

            def push(dx: Tensor) -> Tensor:
                dz = seen(split(by_branch(dx, w_qkv), num_heads))
                return by_branch(merge_heads(jvp(wide, *dz)), output)

            def pull(dy: Tensor) -> Tensor:
                dv = split_heads(by_branch(dy, output.mT), num_heads)
                return by_branch(merge(adjoint(vjp(wide, dv))), w_qkv.mT)

            return LinearMap(push, pull, x.shape, x.dtype, x.device)

        def jacobians(num_vectors: int) -> Jacobians:
            whole = of_heads(
                like.seen, bounded_core.attention_jvp, bounded_core.attention_vjp, like.seen_adjoint
            )
            alone = like.seen_alone
            diagonal = of_heads(
                alone, bounded_core.own_token_jvp, bounded_core.own_token_vjp, alone
            )
            return Jacobians(whole, diagonal, (at, self.weights))

        return by_branch(merge_heads(at.p @ at.v.u), output), jacobians


class StackedFeedForward:
    """φ(x W + b) V, x with the tokens before where the kernel has them."""

    def __init__(self, branches: Sequence[ContractiveFeedForward]) -> None:
        self.weights = FeedForwardWeights(*stacked_weights(branches))
        self.activation = branches[0].activation

    def apply(self, x: Tensor, members: slice) -> tuple[Tensor, Callable[[int], Jacobians]]:
        """f(x) of some members, and their Jacobians."""
        w_in, b_in, w_out = (w[members] for w in self.weights[:3])
        kernel = self.weights.kernel
        h = by_branch(windows(x, kernel), w_in, b_in)

        def of_windows(w_in: Tensor, kernel: int, slope: Tensor) -> LinearMap:
            """What a token and those before it, ``kernel`` in all, do to its row."""

            def push(dx: Tensor) -> Tensor:
                return by_branch(by_branch(windows(dx, kernel), w_in) * slope, w_out)

            def pull(dy: Tensor) -> Tensor:
                hidden = by_branch(dy, w_out.mT) * slope
                return windows_adjoint(by_branch(hidden, w_in.mT), kernel)

            return LinearMap(push, pull, x.shape, x.dtype, x.device)

        def jacobians(num_vectors: int) -> Jacobians:
            slope = activation_slope(self.activation, h)
            diagonal = of_windows(w_in[:, : x.shape[-1]], 1, slope.unsqueeze(2))
            whole = diagonal
            if kernel > 1:
                whole = of_windows(w_in, kernel, slope.unsqueeze(2))
            return Jacobians(whole, diagonal, (slope, self.weights))

        return by_branch(ACTIVATIONS[self.activation](h), w_out), jacobians


class StackedModules:
    """Any other branches, f and its derivatives by autograd, mapped over them."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        self.like = branches[0]
        parameters, buffers = torch.func.stack_module_state(list(branches))
        self.state = {name: t.detach() for name, t in (parameters | buffers).items()}

    def apply(self, x: Tensor, members: slice) -> tuple[Tensor, Callable[[int], Jacobians]]:
        """f(x) of some members, and their Jacobians."""
        state = {name: t[members] for name, t in self.state.items()}

        def one(state: dict[str, Tensor], at: Tensor) -> Tensor:
            return torch.func.functional_call(self.like, state, (at,))

        def f(at: Tensor) -> Tensor:
            with only("math"):  # fused attention has no second derivative
                return torch.func.vmap(one)(state, at)

        def jacobians(num_vectors: int) -> Jacobians:
            whole = linearise(f, x.unsqueeze(2).expand(-1, -1, num_vectors, -1, -1))
            return Jacobians(replace(whole, shape=x.shape))

        return f(x), jacobians


def stacked_weights(branches: Sequence[LipschitzBranch]) -> list[Tensor]:
    """The weights of several branches of one kind, each with a leading dimension of branches."""
    weights = branches[0].weights_of(branches)
    return [torch.stack(each) for each in zip(*weights, strict=True)]


def stacked_biases(
    branches: Sequence[Any], num_tokens: int
) -> Float[Tensor, "branches heads tokens tokens"]:
    """What is added to the logits of every branch."""
    positions = [branch.position for branch in branches]
    if not all(isinstance(position, CausalMask) for position in positions):
        return torch.stack([position(num_tokens) for position in positions])
    return toeplitz(torch.stack([p.by_lag(num_tokens) for p in positions]), num_tokens)


def by_branch(
    x: Float[Tensor, "branches *batch tokens m"],
    w: Float[Tensor, "branches m n"],
    b: Float[Tensor, "branches n"] | None = None,
) -> Float[Tensor, "branches *batch tokens n"]:
    """x W + b of every branch, without a copy of W for every vector and sequence."""
    rows = x.flatten(1, -2)
    y = torch.bmm(rows, w) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w)
    return y.unflatten(1, x.shape[1:-1])


def in_ball(jacobians: Jacobians, entry: BallPoint) -> Jacobians:
    """The Jacobians of f ∘ ψ_R from those of f."""
    wide = BallPoint(*(t.unsqueeze(2) for t in entry))

    def composed(jacobian: LinearMap) -> LinearMap:
        return replace(
            jacobian,
            jvp=lambda dx: jacobian.jvp(wide.derivative(dx)),
            vjp=lambda dy: wide.derivative(jacobian.vjp(dy)),
        )

    diagonal = None if jacobians.diagonal is None else composed(jacobians.diagonal)
    return replace(jacobians, whole=composed(jacobians.whole), diagonal=diagonal)
