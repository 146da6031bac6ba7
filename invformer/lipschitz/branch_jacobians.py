"""The Jacobians of a stack's residual branches at a text, those of one kind stacked."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.kernels.attention import only
from invformer.nn.attention import (
    TiedL2Attention,
    merge_heads,
    split_heads,
)
from invformer.nn.bounded_attention import (
    BoundedAttention,
    BoundedWeights,
    merge,
    side_by_side,
    split,
)
from invformer.nn.branch import LipschitzBranch, frozen_weights
from invformer.nn.feed_forward import (
    ACTIVATIONS,
    ContractiveFeedForward,
    FeedForward,
    FeedForwardWeights,
    activation_slope,
    sharpened,
)
from invformer.nn.residual import InvertibleResidual
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer, PreNormBlock, PreNormBranch
from invformer.numerics import bounded_attention as bounded_core
from invformer.numerics import l2_attention as core
from invformer.numerics.ball import BallPoint, to_ball
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.numerics.token_shift import windows, windows_adjoint

Branch = LipschitzBranch | PreNormBranch
# A product with a Jacobian of the heads, at a point.
HeadsMap = Callable[..., Any]


@dataclass(frozen=True)
class BranchGroup:
    """Branches of one shape, linearised together.

    Attributes:
        names: of the branches; the leading dimension of the Jacobian counts them.
        jacobian: ∂f/∂X, one after the other; its products take a further leading dimension.
        per_token: whether it acts token by token.
        own_token: its diagonal blocks ∂f_i/∂x_i, as one map; None where nobody wrote them down.
    """

    names: tuple[str, ...]
    jacobian: LinearMap
    per_token: bool
    own_token: LinearMap | None = None


def residual_branches(
    model: CharTransformer, x: Float[Tensor, "*batch tokens width"]
) -> Iterator[tuple[str, Branch, Tensor]]:
    """Every residual branch with its name and what it sees, for the stack's input x."""
    if isinstance(model.stack, InvertibleStack):
        for name, layer in model.stack.layers():
            if isinstance(layer, InvertibleResidual):
                yield name, layer.branch, layer.seen(x)
            x = layer(x)
        return
    for index, block in enumerate(model.stack.blocks):
        assert isinstance(block, PreNormBlock)
        for name, branch in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            yield f"block_{index:02d}/{name}", branch, x
            x = x + branch(x)


def branch_jacobians(
    model: CharTransformer, tokens: Integer[Tensor, "sequences tokens"], num_vectors: int = 1
) -> list[BranchGroup]:
    """The Jacobians of all residual branches at a text, those of one kind as one map.

    Args:
        model: the model.
        tokens: the text.
        num_vectors: how many vectors the products will take at once (autograd must know before).
    """
    if not isinstance(model.stack, InvertibleStack):
        branches = residual_branches(model, model.embedding(tokens))
        return [by_autograd(*branch, num_vectors) for branch in branches]
    kinds: dict[type, list[LipschitzBranch]] = {}
    for _, branch in model.stack.branches():
        kinds.setdefault(type(branch), []).append(branch)
    points = {kind: linearisation_points(branches) for kind, branches in kinds.items()}
    x = model.embedding(tokens)
    entries: dict[str, BallPoint] = {}
    for name, layer in model.stack.layers():
        if isinstance(layer, InvertibleResidual):
            if layer.input_radius is not None:
                entries[name] = to_ball(x / layer.input_radius)
            x = x + points[type(layer.branch)].visit(name, layer.branch, layer.seen(x))
        else:
            x = layer(x)
    return [behind_ball(group, entries) for each in points.values() for group in each.groups()]


def behind_ball(group: BranchGroup, entries: Mapping[str, BallPoint]) -> BranchGroup:
    """The Jacobians of f ∘ ψ_R from those of f, where there is a radius."""
    if not entries:
        return group
    u, rho = zip(*(entries[name] for name in group.names), strict=True)
    entry = BallPoint(torch.stack(u), torch.stack(rho))

    def composed(jacobian: LinearMap) -> LinearMap:
        return replace(
            jacobian,
            jvp=lambda dx: jacobian.jvp(entry.derivative(dx)),
            vjp=lambda dy: entry.derivative(jacobian.vjp(dy)),
        )

    own_token = None if group.own_token is None else composed(group.own_token)
    return replace(group, jacobian=composed(group.jacobian), own_token=own_token)


class LinearisationPoints(Protocol):
    """What collects the Jacobians of some branches on the way up."""

    def visit(self, name: str, branch: LipschitzBranch, x: Tensor) -> Tensor:
        """f(x) of the next branch, whose Jacobian is wanted at x."""
        ...

    def groups(self) -> list[BranchGroup]:
        """The Jacobians of all branches met."""
        ...


def linearisation_points(branches: list[LipschitzBranch]) -> LinearisationPoints:
    """The way to linearise branches of one type: stacked where their Jacobian is known here."""
    first = branches[0]
    if isinstance(first, TiedL2Attention):
        return AttentionPoints(branches)
    if isinstance(first, BoundedAttention):
        return BoundedAttentionPoints()
    if isinstance(first, ContractiveFeedForward):
        return FeedForwardPoints(branches)
    return SinglePoints()


class SinglePoints:
    """Branches linearised one by one, each as it says itself."""

    def __init__(self) -> None:
        self.found: list[BranchGroup] = []

    def visit(self, name: str, branch: LipschitzBranch, x: Tensor) -> Tensor:
        """f(x) of the next branch, whose Jacobian is wanted at x."""
        with frozen_weights(branch):
            jacobian = branch.linearise(x)
            y = branch(x)
        one = LinearMap(
            jvp=lambda vectors: torch.stack([jacobian.jvp(v[0])[None] for v in vectors]),
            vjp=lambda vectors: torch.stack([jacobian.vjp(v[0])[None] for v in vectors]),
            shape=torch.Size((1, *x.shape)),
            dtype=x.dtype,
            device=x.device,
        )
        self.found.append(BranchGroup((name,), one, per_token=False))
        return y

    def groups(self) -> list[BranchGroup]:
        """The Jacobians of all branches met."""
        return self.found


class AttentionPoints:
    """Attention branches met on the way up: q and P at the input of each, which is all J needs.

    Args:
        branches: of one type and shape, bottom first.
    """

    def __init__(self, branches: list) -> None:
        self.w_q, self.g = stacked_weights(branches)
        self.query = self.w_q.transpose(-3, -2).flatten(-2)
        self.output = self.g.flatten(-3, -2)
        self.names: list[str] = []
        self.q: list[Tensor] = []
        self.p: list[Tensor] = []
        self.shape = torch.Size()

    def visit(self, name: str, branch: LipschitzBranch, x: Tensor) -> Tensor:
        """f(x) of the next branch, whose Jacobian is wanted at x."""
        assert isinstance(branch, TiedL2Attention)
        index = len(self.names)
        q = split_heads(x @ self.query[index], self.w_q.shape[1])
        p = core.attention_weights(q, branch.position(x.shape[-2]))
        self.names.append(name)
        self.q.append(q)
        self.p.append(p)
        self.shape = x.shape
        return merge_heads(p @ q) @ self.output[index]

    def groups(self) -> list[BranchGroup]:
        """The Jacobians of all branches met: those of ``attention_jacobian``, batched."""
        q, p = torch.stack(self.q), torch.stack(self.p)
        num_heads = self.w_q.shape[1]
        shape = torch.Size((len(self.names), *self.shape))

        def of_heads(jvp: HeadsMap, vjp: HeadsMap) -> LinearMap:
            def push(dx: Tensor) -> Tensor:
                dq = split_heads(batched_matmul(dx, self.query), num_heads)
                return batched_matmul(merge_heads(jvp(q, p, dq)), self.output)

            def pull(dy: Tensor) -> Tensor:
                dv = split_heads(batched_matmul(dy, self.output.mT), num_heads)
                return batched_matmul(merge_heads(vjp(q, p, dv)), self.query.mT)

            return LinearMap(push, pull, shape, q.dtype, q.device)

        jacobian = of_heads(core.l2_attention_jvp, core.l2_attention_vjp)
        own_token = of_heads(core.own_token_product, core.own_token_product)
        return [BranchGroup(tuple(self.names), jacobian, False, own_token)]


class BoundedAttentionPoints:
    """Attention in the unit ball met on the way up: projections and P at the input of each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.points: list[bounded_core.AttentionPoint] = []
        self.weights: list[BoundedWeights] = []
        self.branch: BoundedAttention | None = None
        self.shape = torch.Size()

    def visit(self, name: str, branch: LipschitzBranch, x: Tensor) -> Tensor:
        """f(x) of the next branch, whose Jacobian is wanted at x."""
        assert isinstance(branch, BoundedAttention)
        weights = branch.weights()
        at = branch.point(x, weights)
        self.branch = branch
        self.names.append(name)
        self.points.append(at)
        self.weights.append(weights)
        self.shape = x.shape
        return merge_heads(at.p @ at.v.u) @ weights.g.flatten(-3, -2)

    def groups(self) -> list[BranchGroup]:
        """The Jacobians of all branches met: those of their ``linearise``, batched."""
        like = self.branch  # all are of one shape and see the same tokens
        assert like is not None
        w_qkv = torch.stack([side_by_side(w.w_qkv) for w in self.weights])
        output = torch.stack([w.g.flatten(-3, -2) for w in self.weights])
        num_heads = self.weights[0].g.shape[0]
        at = bounded_core.stacked_points(self.points)
        shape = torch.Size((len(self.names), *self.shape))

        def of_heads(seen: HeadsMap, jvp: HeadsMap, vjp: HeadsMap, adjoint: HeadsMap) -> LinearMap:
            def push(dx: Tensor) -> Tensor:
                dz = seen(split(batched_matmul(dx, w_qkv), num_heads))
                return batched_matmul(merge_heads(jvp(at, *dz)), output)

            def pull(dy: Tensor) -> Tensor:
                dv = split_heads(batched_matmul(dy, output.mT), num_heads)
                return batched_matmul(merge(adjoint(vjp(at, dv))), w_qkv.mT)

            return LinearMap(push, pull, shape, output.dtype, output.device)

        core = bounded_core
        jacobian = of_heads(like.seen, core.attention_jvp, core.attention_vjp, like.seen_adjoint)
        alone = like.seen_alone
        own_token = of_heads(alone, core.own_token_jvp, core.own_token_vjp, alone)
        return [BranchGroup(tuple(self.names), jacobian, False, own_token)]


class FeedForwardPoints:
    """Feed-forward branches met on the way up: the slopes at the input of each.

    Args:
        branches: of one type and shape, bottom first.
    """

    def __init__(self, branches: list) -> None:
        self.weights = stacked_weights(branches)
        self.names: list[str] = []
        self.slopes: list[Tensor] = []
        self.shape = torch.Size()

    def visit(self, name: str, branch: LipschitzBranch, x: Tensor) -> Tensor:
        """f(x) of the next branch, whose Jacobian is wanted at x."""
        assert isinstance(branch, ContractiveFeedForward)
        weights = FeedForwardWeights(*(w[len(self.names)] for w in self.weights))
        h = sharpened(x, weights)
        self.names.append(name)
        self.slopes.append(activation_slope(branch.activation, h))
        self.shape = x.shape
        return ACTIVATIONS[branch.activation](h) @ weights.w_out

    def groups(self) -> list[BranchGroup]:
        """The Jacobians of all branches met: those of ``feed_forward_jacobian``, batched."""
        w_in, kernel = self.weights.w_in, self.weights.kernel
        own_token = self.of_windows(w_in[..., : self.shape[-1], :], 1)
        jacobian = own_token if kernel == 1 else self.of_windows(w_in, kernel)
        return [BranchGroup(tuple(self.names), jacobian, kernel == 1, own_token)]

    def of_windows(self, w_in: Tensor, kernel: int) -> LinearMap:
        """What a token and those before it, ``kernel`` in all, do to its row."""
        slope, w_out = torch.stack(self.slopes), self.weights.w_out

        def push(dx: Tensor) -> Tensor:
            hidden = batched_matmul(windows(dx, kernel), w_in) * slope
            return batched_matmul(hidden, w_out)

        def pull(dy: Tensor) -> Tensor:
            hidden = batched_matmul(dy, w_out.mT) * slope
            return windows_adjoint(batched_matmul(hidden, w_in.mT), kernel)

        shape = torch.Size((len(self.names), *self.shape))
        return LinearMap(push, pull, shape, slope.dtype, slope.device)


def stacked_weights(branches: list) -> Any:
    """The weights of several branches, in one go where it is known how."""
    (kind, *others), first = {b.kind() for b in branches}, branches[0]
    together = not others and kind is not None and not first.is_frozen
    weights = first.forward_weights(branches) if together else [b.weights() for b in branches]
    return type(weights[0])(*(torch.stack(stacked) for stacked in zip(*weights, strict=True)))


def batched_matmul(
    x: Float[Tensor, "*vectors branches sequences tokens m"], w: Float[Tensor, "branches m n"]
) -> Float[Tensor, "*vectors branches sequences tokens n"]:
    """x W of every branch, without a copy of W per vector and sequence, as broadcasting makes."""
    if x.ndim == 4:
        return torch.bmm(x.flatten(1, 2), w).unflatten(1, x.shape[1:3])
    rows = x.transpose(0, 1)
    return torch.bmm(rows.flatten(1, 3), w).unflatten(1, rows.shape[1:4]).transpose(0, 1)


def by_autograd(
    name: str, branch: Branch, x: Float[Tensor, "sequences tokens width"], num_vectors: int
) -> BranchGroup:
    """One branch whose Jacobian nobody wrote down: a graph wide enough for all vectors at once."""
    inner = branch.inner if isinstance(branch, PreNormBranch) else None
    per_token = isinstance(inner, FeedForward) and inner.kernel == 1
    count = 1 if per_token else num_vectors
    with only("math"):
        jacobian = linearise(branch, x.expand(count, *x.shape))
    shape = (count, *x.shape) if per_token else (count, 1, *x.shape)
    return BranchGroup(
        (name,),
        LinearMap(
            jvp=lambda vectors: jacobian.jvp(vectors.view(jacobian.shape)).view(shape),
            vjp=lambda vectors: jacobian.vjp(vectors.view(jacobian.shape)).view(shape),
            shape=torch.Size((1, *x.shape)),
            dtype=x.dtype,
            device=x.device,
        ),
        per_token,
    )
