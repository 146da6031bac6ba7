"""The stack of a model in enclosures of real numbers: its rounding, bounded number by number."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.evaluation.enclosed_branches import (
    Branch,
    DotProductBranch,
    FeedForwardBranch,
    L2AttentionBranch,
    NotEnclosed,
    layer_norm,
    require_normal,
)
from invformer.nn.attention import TiedL2Attention, side_by_side
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.branch import LipschitzBranch
from invformer.nn.coupling import CouplingBlock
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.feed_forward import ContractiveFeedForward, FeedForward
from invformer.nn.scaling import ActivationNorm, ScalingWeights
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer, PreNormStack
from invformer.numerics.enclosure import (
    Enclosure,
    Pair,
    U,
    accumulate,
    affine,
    constant,
    divide,
    into_ball,
    matmul,
    outward,
    paired,
    scale,
    size,
)


class Network:
    """The stack of a model in enclosures, for symbols that each continue a beginning of one text.

    Channels stay in the coordinates of the embedding, as sums of two float64: what normalisations
    and diagonal scalings make of them, A x + B, is made where a branch reads them. What a branch's
    inner numbers may be off is kept number by number: an error e of them is e V A⁻¹ in the channels
    and e (V A⁻¹ A′ W) where a later branch reads, and the one matrix is smaller than the product of
    the moduli of its factors.

    Args:
        model: with the weights it has now.
        length: tokens of a text.
        split: whether products are more accurate than float64's own, which takes longer.

    Raises:
        NotEnclosed: the model has a layer whose rounding is not bounded here.
    """

    def __init__(self, model: CharTransformer, length: int, split: bool = True) -> None:
        self.split = split
        self.embedding = model.embedding
        self.vocab_size = model.embedding.token.num_embeddings
        require_normal(model.embedding.token.weight, model.embedding.position)
        width = torch.zeros(model.head.in_features, device=model.embedding.position.device)
        factor, shift = paired(constant(width + 1)), paired(constant(width))
        writes = constant(torch.zeros(0, len(width), device=width.device)).middle
        self.steps: list[Step] = []
        for branch, scaling in layers_of(model.stack, length):
            inside = factor, shift
            if scaling is not None:
                require_normal(scaling.scale, scaling.shift)
                by, to = constant(scaling.scale).middle, constant(scaling.shift)
                inside = scale(factor, by), accumulate(scale(shift, by), paired(to))
            if branch is None:
                factor, shift = inside
                continue
            branch.make_matrices(split)
            self.steps.append(Step(branch, *inside, writes))
            writes = torch.cat([writes, branch.weights[-1].middle / inside[0].high])
        self.top = Step(None, factor, shift, writes)

    def __call__(
        self,
        symbols: Integer[Tensor, "rows"],
        places: Integer[Tensor, "rows"],
        past: list[Any] | None,
    ) -> tuple[Enclosure, list[Any]]:
        """The states of some symbols, each at its place behind the same beginning.

        Args:
            symbols: one a row.
            places: their positions.
            past: what the branches keep of the text they continue; None if the rows are that text.

        Returns:
            States (rows, D), and what the branches keep of these rows.
        """
        table, position = self.embedding.token.weight, self.embedding.position
        x = accumulate(paired(constant(table[symbols])), paired(constant(position[places])))
        x = Pair(*(nn.functional.pad(t, (0, self.embedding.padding)) for t in x))
        errors = x.radius[:, :0]
        kept = []
        for index, step in enumerate(self.steps):
            branch = step.branch
            assert branch is not None
            z = step.read(x, errors, None if past is None else branch.num_reads)
            value, own = branch.inner(z, places, None if past is None else past[index])
            errors = torch.cat([errors, value.radius], -1)
            written = matmul(constant(value.middle), branch.output, *branch.terms)
            x = accumulate(x, paired(divide(written, step.scale)))
            kept.append(own)
        return self.top.state(x, errors), kept


class Step:
    """A branch, and how it reads the channels: A x + B and the errors of branches before it.

    Args:
        branch: None at the top of the stack.
        factor: A.
        shift: B.
        writes: V A⁻¹ of the branches before, one on top of the other, (inner numbers, D); each
            entry to a relative error of 4 u.
    """

    def __init__(
        self, branch: Branch | None, factor: Pair, shift: Pair, writes: Float[Tensor, "inner width"]
    ) -> None:
        self.branch, self.factor, self.shift = branch, factor, shift
        if not bool((factor.radius <= U * factor.high).all()):
            raise NotEnclosed("channels are scaled out of the range of float64")
        self.scale = Enclosure(factor.high, factor.radius + size(factor.low))
        self.to_channels = sizes_of(writes, factor.high.diag())
        matrices = [] if branch is None or branch.prepare is not None else branch.weights[:-1]
        self.to_reads = [sizes_of(writes * factor.high, w.middle) for w in matrices]

    def read(self, x: Pair, errors: Tensor, count: int | None) -> list[Enclosure]:
        """x W for the first W of the branch, or for all."""
        assert self.branch is not None
        matrices, prepare = self.branch.reads[:count], self.branch.prepare
        if prepare is not None:
            seen = prepare(self.state(x, errors))
            return [matmul(seen, w) for w in matrices]
        u = affine(x, self.factor, self.shift)
        return [
            spread(matmul(u, w), errors, sizes)
            for w, sizes in zip(matrices, self.to_reads, strict=False)
        ]

    def state(self, x: Pair, errors: Tensor) -> Enclosure:
        """A x + B."""
        return spread(affine(x, self.factor, self.shift), errors, self.to_channels)


def sizes_of(x: Tensor, y: Tensor) -> Float[Tensor, "inner out"]:
    """|x y| rounded up, in float32, for entries known to a relative error of 8 u each."""
    rounding = 4 * (x.shape[-1] + 32) * U * (x.abs() @ y.abs())
    return outward((x @ y).abs().add_(rounding).float())


def spread(x: Enclosure, errors: Tensor, sizes: Float[Tensor, "inner out"]) -> Enclosure:
    """x whose entries may further be off by errors times matrices of these sizes."""
    further = errors @ sizes * (1 + 2.0**-22 * (len(sizes) + 8))
    return Enclosure(x.middle, outward(x.radius + further))


def layers_of(
    stack: nn.Module, length: int
) -> Iterator[tuple["Branch | None", ScalingWeights | None]]:
    """The layers of a stack in the order they act: each branch with the D and b it reads in.

    A normalisation D x + b has no branch.

    Raises:
        NotEnclosed: there is one that is not known here.
    """
    if isinstance(stack, InvertibleStack):
        weights = stack.weights()
        for name, layer in stack.layers():
            if isinstance(layer, ActivationNorm):
                yield None, weights[name]
                continue
            branch = enclosed_branch(name, layer.branch, length, weights[name].branch)
            if layer.input_radius is not None:
                branch.prepare = partial(into_ball, radius=layer.input_radius)
            yield branch, weights[name].scaling
        return
    assert isinstance(stack, PreNormStack)
    for index, block in enumerate(stack.blocks):
        for name in ("attention", "feed_forward"):
            layer = getattr(block, name)
            inner = layer.inner
            weights = inner.weights() if isinstance(inner, LipschitzBranch) else None
            branch = enclosed_branch(f"block_{index:02d}/{name}", inner, length, weights)
            branch.prepare = partial(layer_norm, norm=layer.norm)
            if isinstance(block, CouplingBlock):
                couple(branch, layer.norm, adds_to=0 if name == "attention" else 1)
            yield branch, None


def couple(branch: Branch, norm: nn.LayerNorm, adds_to: int) -> None:
    """Let a branch add to one half of the channels, and read the other half."""
    empty = [0, norm.normalized_shape[0]]
    pads = tuple(reversed(empty) if adds_to else empty)

    def widened(t: Tensor) -> Tensor:
        return nn.functional.pad(t, pads)

    *reads, output = branch.weights
    branch.weights = [*reads, output.map(widened)]
    branch.terms = [term.map(widened) for term in branch.terms]
    branch.prepare = lambda x: layer_norm(x.map(lambda t: t.chunk(2, -1)[1 - adds_to]), norm)


def enclosed_branch(name: str, branch: nn.Module, length: int, weights: Any) -> Branch:
    """A branch in enclosures, with its weights.

    Raises:
        NotEnclosed: it is not known here.
    """
    match branch:
        case ContractiveFeedForward():
            w_in, b_in, w_out, _ = weights
            return FeedForwardBranch(w_in, b_in, w_out, None, branch.activation)
        case FeedForward():
            w_in, b_in, w_out, b_out = branch.parameters()
            activation = type(branch[1]).__name__.lower()  # nn.GELU → gelu
            return FeedForwardBranch(w_in.mT, b_in, w_out.mT, b_out, activation)
        case TiedL2Attention():
            return L2AttentionBranch(branch.position, weights, length)
        case BoundedAttention():
            w_qkv, temperature, g = weights
            return DotProductBranch(
                branch.position,
                side_by_side(w_qkv.flatten(0, 1)),
                g.flatten(-3, -2),
                temperature,
                length,
                in_ball=True,
                strictly_causal=branch.strictly_causal,
            )
        case DotProductAttention():
            d_head = branch.qkv.in_features // branch.num_heads
            factor = torch.full((branch.num_heads,), 1 / d_head, dtype=torch.float64).sqrt()
            w_qkv, output = branch.qkv.weight.mT, branch.out.weight.mT
            return DotProductBranch(branch.position, w_qkv, output, factor, length)
    raise NotEnclosed(f"{name}: the rounding of a {type(branch).__name__} is not bounded")
