"""The stack of a model in enclosures of real numbers: its rounding, bounded number by number."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.branches.branch import Branch
from invformer.branches.dot_product import PreNormBranch
from invformer.branches.enclosed import LARGEST, EnclosedBranch, NotEnclosed, weight
from invformer.nn.coupling import CouplingBlock, CouplingStack
from invformer.nn.stack import InvertibleStack, full_name
from invformer.nn.transformer import (
    CharTransformer,
    PreNormBlock,
    PreNormStack,
)
from invformer.numerics.enclosure import Enclosure, U, constant, outward
from invformer.numerics.pairs import Pair, paired
from invformer.weights.scaling import ActivationNorm, ScalingWeights


class Network:
    """The stack of a model in enclosures, for symbols that each continue a beginning of one text.

    Channels stay in the coordinates of the embedding, as sums of two float64: what normalisations
    and diagonal scalings make of them, A x + B, is made where a branch reads them. What a branch's
    inner numbers may be off is kept number by number: an error e of them is e V A⁻¹ in the channels
    and e (V A⁻¹ A′ W) where a later branch reads, and the one matrix is smaller than the product of
    the moduli of its factors. If ``accurate``, every number is a sum of two float64, which takes
    longer. It raises NotEnclosed if the rounding of a layer is not bounded here. Autocast has to be
    off, and products of float32 in full precision.
    """

    def __init__(self, model: CharTransformer, length: int, accurate: bool = True) -> None:
        self.accurate, self.padding = accurate, model.embedding.padding
        self.symbols = weight(model.embedding.token.weight)
        self.positions = weight(model.embedding.position)
        ones = torch.ones(1, model.head.in_features, device=self.symbols.middle.device)
        factor, shift = (paired(constant(t[0])) for t in (ones, 0 * ones))
        writes = constant(ones[:0]).middle
        self.steps: list[Step] = []
        for layer in layers_of(model.stack):
            inside = factor, shift
            if layer.scaling is not None:
                by = weight(layer.scaling.scale)
                inside = factor * by, shift * by + weight(layer.scaling.shift)
            if layer.branch is None:
                factor, shift = inside
                continue
            try:
                branch = layer.branch.enclosed(layer.weights, length)
            except NotEnclosed as error:
                raise NotEnclosed(f"{layer.name}: {error}") from None
            branch.write_from(layer.first, ones.shape[-1])
            self.steps.append(Step(branch, layer.makes, *inside, writes, accurate))
            writes = torch.cat([writes, branch.weights[-1].middle / inside[0].middle])
        self.top = View(factor, shift, writes, accurate)

    def __call__(
        self,
        symbols: Integer[Tensor, "rows"],
        places: Integer[Tensor, "rows"],
        past: list[Any] | None,
    ) -> tuple[Enclosure, list[Any]]:
        """The states (rows, D) of some symbols, each at its place behind the same beginning.

        ``past`` is what the branches keep of the text they continue; None if the rows are that
        text. What they keep of these rows is returned beside the states.
        """
        x = paired(self.symbols[symbols]) + self.positions[places]
        x = x.map(lambda t: nn.functional.pad(t, (0, self.padding)))
        errors = x.radius[:, :0]
        kept = []
        for index, step in enumerate(self.steps):
            branch, before = step.branch, None if past is None else past[index]
            z = step.read(x, errors, None if past is None else branch.num_reads)
            value, own = branch.inner(z, places, before)
            errors = torch.cat([errors, value.radius], -1)
            x = x + value.exact().matmul(branch.output) / step.scale
            kept.append(own)
        return self.top.state(x, errors), kept


class Layer(NamedTuple):
    """A branch, what it makes of the channels before it reads them, and where it begins to write.

    Without a branch it is a scaling of all channels.
    """

    name: str
    branch: Branch | None
    makes: Callable[[Enclosure], Enclosure] | None
    scaling: ScalingWeights | None
    weights: Any
    first: int = 0


def layers_of(stack: nn.Module) -> Iterator[Layer]:
    """The layers of a stack in the order they act."""
    if isinstance(stack, InvertibleStack):
        weights = stack.weights()
        for name, layer in stack.layers():
            if isinstance(layer, ActivationNorm):
                yield Layer(name, None, None, weights[name], None)
                continue
            radius, of_layer = layer.input_radius, weights[name]
            makes = None if radius is None else methodcaller("into_ball", radius)
            yield Layer(name, layer.branch, makes, of_layer.scaling, of_layer.branch)
    elif isinstance(stack, PreNormStack) and type(stack) in (PreNormStack, CouplingStack):
        for index, block in enumerate(stack.blocks):
            if type(block) not in (PreNormBlock, CouplingBlock):
                raise NotEnclosed(f"the rounding of a {type(block).__name__} is not bounded")
            for name, layer in block.named_children():
                norm, read, first = layer.norm, slice(None), 0
                if type(layer) is not PreNormBranch or type(norm) is not nn.LayerNorm:
                    raise NotEnclosed(f"the rounding of a {type(norm).__name__} is not bounded")
                if isinstance(block, CouplingBlock):  # attention adds to the first stream
                    (width,) = norm.normalized_shape
                    second = slice(width, None)
                    read, first = (second, 0) if name == "attention" else (slice(width), width)
                makes = partial(layer_norm, norm=norm, read=read)
                yield Layer(full_name(index, name), layer.inner, makes, None, None, first)
    else:
        raise NotEnclosed(f"the rounding of a {type(stack).__name__} is not bounded")


def layer_norm(x: Enclosure, norm: nn.LayerNorm, read: slice) -> Enclosure:
    """(x − mean)/√(variance + ε) · γ + β over some channels."""
    x = x[..., read]
    count, eps = (constant(x.middle.new_tensor(n)) for n in (x.middle.shape[-1], norm.eps))
    apart = x - (x.sum() / count)[..., None]
    inverse = (apart.square_sum() / count + eps).inverse_root()
    return apart * inverse[..., None] * weight(norm.weight) + weight(norm.bias)


class View:
    """A x + B of the channels x, and of the errors of branches before.

    ``writes`` is V A⁻¹ of the branches before, one on top of the other, (inner numbers, D); each
    entry to a relative error of 4 u. Unless ``accurate``, results are rounded to float64.
    """

    def __init__(
        self, factor: Pair, shift: Pair, writes: Float[Tensor, "inner width"], accurate: bool
    ) -> None:
        self.factor, self.shift, self.accurate = factor, shift, accurate
        if not bool((factor.radius <= U * factor.middle).all()):
            raise NotEnclosed("channels are scaled out of the range of float64")
        self.scale = factor if accurate else factor.single()
        self.to_channels = sizes_of(writes, factor.middle.diag())

    def seen(self, x: Pair) -> Enclosure:
        """A x + B, but for the errors of branches before."""
        u = x * self.factor + self.shift
        return u if self.accurate else u.single()

    def state(self, x: Pair, errors: Tensor) -> Enclosure:
        """A x + B."""
        return spread(self.seen(x), errors, self.to_channels)


class Step(View):
    """A branch, and the channels as it reads them: in a ball, or normalised."""

    def __init__(
        self,
        branch: EnclosedBranch,
        makes: Callable[[Enclosure], Enclosure] | None,
        factor: Pair,
        shift: Pair,
        writes: Tensor,
        accurate: bool,
    ) -> None:
        super().__init__(factor, shift, writes, accurate)
        self.branch, self.makes = branch, makes
        matrices = [] if makes is not None else branch.weights[:-1]
        self.to_reads = [sizes_of(writes * factor.middle, w.middle) for w in matrices]

    def read(self, x: Pair, errors: Tensor, count: int | None) -> list[Enclosure]:
        """(A x + B) W for the first W of the branch, or for all."""
        matrices = self.branch.reads[:count]
        if self.makes is not None:
            seen = self.makes(self.state(x, errors))
            return [seen.matmul(w) for w in matrices]
        u = self.seen(x)
        pairs = zip(matrices, self.to_reads, strict=False)
        return [spread(u.matmul(w), errors, sizes) for w, sizes in pairs]


def sizes_of(x: Tensor, y: Tensor) -> Float[Tensor, "inner out"]:
    """|x y| rounded up, in float32, for entries known to a relative error of 8 u each."""
    rounding = 4 * (x.shape[-1] + 32) * U * (x.abs() @ y.abs())
    return outward((x @ y).abs().add_(rounding).float())


def spread(x: Enclosure, errors: Tensor, sizes: Float[Tensor, "inner out"]) -> Enclosure:
    """x whose entries may further be off by errors times matrices of these sizes.

    Nothing is known of numbers above LARGEST.
    """
    further = errors @ sizes * (1 + 2.0**-22 * (len(sizes) + 8))
    radius = outward(x.radius + further)
    known = (radius <= LARGEST) & (x.middle.abs() <= LARGEST)
    return replace(x, radius=radius.masked_fill(~known, math.inf))
