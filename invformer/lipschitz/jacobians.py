"""The residual branches of a stack at a text, those of one kind and shape stacked.

Everything here has a leading dimension of branches: one launch serves all of them, at any depth.
Products with a Jacobian take a further dimension after the sequences, of several vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

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
    Activation,
    ContractiveFeedForward,
    FeedForward,
    FeedForwardWeights,
    activation_slope,
)
from invformer.nn.position_bias import CausalMask, RelativePositionBias
from invformer.nn.residual import InvertibleResidual
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import CharTransformer, PreNormBlock, PreNormBranch
from invformer.numerics import bounded_attention as bounded_core
from invformer.numerics import l2_attention as core
from invformer.numerics.ball import BallPoint, to_ball
from invformer.numerics.linear_map import LinearMap, SequenceMap, linearise
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

    def changed(self, change: Callable[[LinearMap], LinearMap]) -> "Jacobians":
        """Both maps, changed alike."""
        diagonal = None if self.diagonal is None else change(self.diagonal)
        return Jacobians(change(self.whole), diagonal, self.at)


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
        seen: list[tuple[PreNormBranch, Tensor]] = []

        def apply(branch: PreNormBranch, x: Tensor, seen: Any = seen) -> Tensor:
            seen.append((branch, x))
            return branch(x)

        x = block.compose(x, apply)
        for name, (branch, at) in zip(("attention", "feed_forward"), seen, strict=True):
            yield f"block_{index:02d}/{name}", branch, at


def acts_per_token(branch: Branch) -> bool:
    """Whether f acts token by token."""
    if isinstance(branch, LipschitzBranch):
        return branch.is_token_wise
    return isinstance(branch.inner, FeedForward) and branch.inner.kernel == 1


def of_branches(
    branches: Sequence[Any], weights: Sequence[Any], x: Tensor, num_vectors: int = 1
) -> Jacobians:
    """Those of contractive branches of one kind, each with its weights at an input of its own.

    Branches without products of their own here go through autograd, for ``num_vectors`` vectors.
    """
    match branches[0]:
        case TiedL2Attention():
            bias = stacked_biases(branches, x.shape[-2])
            return of_l2_attention(stacked(weights), bias, x)
        case BoundedAttention():
            bias = stacked_biases(branches, x.shape[-2]).to(x)
            return of_bounded_attention(branches[0], stacked(weights), bias, x)
        case ContractiveFeedForward():
            return of_feed_forward(stacked(weights), branches[0].activation, x)
    return by_autograd(
        lambda at: torch.stack([f(*pair) for f, *pair in zip(branches, at, weights, strict=True)]),
        x,
        num_vectors,
    )


def stacked(weights: Sequence[Any]) -> Any:
    """The weights of several branches of one kind as one value, branch first."""
    return type(weights[0])(*(torch.stack(each) for each in zip(*weights, strict=True)))


def of_l2_attention(weights: L2Weights, bias: Tensor, x: Tensor) -> Jacobians:
    """Σ_h (P^h q^h) G_h with q = X W_h."""
    num_heads = weights.g.shape[1]
    query = weights.w_q.transpose(-3, -2).flatten(-2)
    output = weights.g.flatten(-3, -2)
    q = split_heads(by_branch(x, query), num_heads)
    p = core.attention_weights(q, bias[:, None])
    at = q.unsqueeze(2), p.unsqueeze(2)

    def of_heads(jvp: Callable, vjp: Callable) -> LinearMap:
        def push(dx: Tensor) -> Tensor:
            dq = split_heads(by_branch(dx, query), num_heads)
            return by_branch(merge_heads(jvp(*at, dq)), output)

        def pull(dy: Tensor) -> Tensor:
            dv = split_heads(by_branch(dy, output.mT), num_heads)
            return by_branch(merge_heads(vjp(*at, dv)), query.mT)

        return LinearMap(push, pull, x.shape, x.dtype, x.device)

    whole = of_heads(core.l2_attention_jvp, core.l2_attention_vjp)
    diagonal = of_heads(core.diagonal_block_product, core.diagonal_block_product)
    return Jacobians(whole, diagonal, (q, p, weights))


def of_bounded_attention(
    like: BoundedAttention, weights: BoundedWeights, bias: Tensor, x: Tensor
) -> Jacobians:
    """[P_h v_h]_h G, queries, keys and values held in the unit ball; all see the same tokens."""
    num_heads = weights.g.shape[1]
    w_qkv = weights.w_qkv.flatten(1, 2).transpose(1, 2).flatten(2)
    output = weights.g.flatten(-3, -2)
    z = torch.stack(like.delayed(split(by_branch(x, w_qkv), num_heads)))
    q, k, v = (BallPoint(*point) for point in zip(*to_ball(z), strict=True))
    temperature = weights.temperature[:, None, :, None, None]
    p = (temperature * q.u @ k.u.mT + bias[:, None]).softmax(-1)
    wide = bounded_core.AttentionPoint(
        *(BallPoint(*(t.unsqueeze(2) for t in point)) for point in (q, k, v)),
        p=p.unsqueeze(2),
        temperature=temperature.unsqueeze(2),
    )

    def of_heads(seen: Callable, jvp: Callable, vjp: Callable, adjoint: Callable) -> LinearMap:
        def push(dx: Tensor) -> Tensor:
            dz = seen(split(by_branch(dx, w_qkv), num_heads))
            return by_branch(merge_heads(jvp(wide, *dz)), output)

        def pull(dy: Tensor) -> Tensor:
            dv = split_heads(by_branch(dy, output.mT), num_heads)
            return by_branch(merge(adjoint(vjp(wide, dv))), w_qkv.mT)

        return LinearMap(push, pull, x.shape, x.dtype, x.device)

    products = bounded_core.attention_jvp, bounded_core.attention_vjp
    whole = of_heads(like.delayed, *products, like.delayed_adjoint)
    own = bounded_core.diagonal_block_jvp, bounded_core.diagonal_block_vjp
    diagonal = of_heads(like.delayed_diagonal, *own, like.delayed_diagonal)
    at = bounded_core.AttentionPoint(q, k, v, p, temperature)
    return Jacobians(whole, diagonal, (at, weights))


def of_feed_forward(weights: FeedForwardWeights, activation: Activation, x: Tensor) -> Jacobians:
    """φ(x W + b) V, x with the tokens before where the kernel has them."""
    w_in, b_in, w_out, _ = weights
    slope = activation_slope(activation, by_branch(windows(x, weights.kernel), w_in, b_in))
    wide = slope.unsqueeze(2)

    def of_windows(w_in: Tensor, kernel: int) -> LinearMap:
        """What a token and those before it, ``kernel`` in all, do to its row."""

        def push(dx: Tensor) -> Tensor:
            return by_branch(by_branch(windows(dx, kernel), w_in) * wide, w_out)

        def pull(dy: Tensor) -> Tensor:
            return windows_adjoint(by_branch(by_branch(dy, w_out.mT) * wide, w_in.mT), kernel)

        return LinearMap(push, pull, x.shape, x.dtype, x.device)

    diagonal = of_windows(w_in[:, : x.shape[-1]], 1)
    whole = diagonal if weights.kernel == 1 else of_windows(w_in, weights.kernel)
    return Jacobians(whole, diagonal, (slope, weights))


def of_modules(branches: Sequence[nn.Module], x: Tensor, num_vectors: int) -> Jacobians:
    """Those of any other branches, by autograd, mapped over them with their parameters stacked."""
    parameters, buffers = torch.func.stack_module_state(list(branches))
    state = {name: t.detach() for name, t in (parameters | buffers).items()}

    def one(state: dict[str, Tensor], at: Tensor) -> Tensor:
        return torch.func.functional_call(branches[0], state, (at,))

    return by_autograd(lambda at: torch.func.vmap(one)(state, at), x, num_vectors)


def by_autograd(f: SequenceMap, x: Tensor, num_vectors: int) -> Jacobians:
    """Those of a map of all branches' inputs at once."""
    with only("math"):  # fused attention has no second derivative
        whole = linearise(f, x.unsqueeze(2).expand(-1, -1, num_vectors, -1, -1))
    return Jacobians(replace(whole, shape=x.shape))


def stacked_biases(
    branches: Sequence[Any], num_tokens: int
) -> Float[Tensor, "branches heads tokens tokens"]:
    """What is added to the logits of every branch."""
    positions = [branch.position for branch in branches]
    if all(type(position) is RelativePositionBias for position in positions):
        tables = torch.stack([position.table[:, : num_tokens - 1] for position in positions])
        return toeplitz(F.pad(tables, (1, 0)), num_tokens)
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
    return jacobians.changed(
        lambda j: replace(
            j,
            jvp=lambda dx: j.jvp(wide.derivative(dx)),
            vjp=lambda dy: wide.derivative(j.vjp(dy)),
        )
    )


def scaled(jacobians: Jacobians, scale: Float[Tensor, "branches 1 1 width"]) -> Jacobians:
    """D J D⁻¹ from J."""
    d = scale.unsqueeze(2)
    return jacobians.changed(
        lambda j: replace(j, jvp=lambda dx: d * j.jvp(dx / d), vjp=lambda dy: j.vjp(d * dy) / d)
    )
