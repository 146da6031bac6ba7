"""The stack of a model in enclosures of real numbers: its rounding, bounded number by number."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.evaluation.enclosed_branches import Branch, NotEnclosed, enclosed_branch, weight
from invformer.nn.scaling import ActivationNorm
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.enclosure import Enclosure, U, constant, outward
from invformer.numerics.pairs import Pair, paired


class Network:
    """The stack of a model in enclosures, for symbols that each continue a beginning of one text.

    Channels stay in the coordinates of the embedding, as sums of two float64: what normalisations
    and diagonal scalings make of them, A x + B, is made where a branch reads them. What a branch's
    inner numbers may be off is kept number by number: an error e of them is e V A⁻¹ in the channels
    and e (V A⁻¹ A′ W) where a later branch reads, and the one matrix is smaller than the product of
    the moduli of its factors. If ``accurate``, every number is a sum of two float64, which takes
    longer. It raises NotEnclosed if the rounding of a layer is not bounded here.
    """

    def __init__(self, model: CharTransformer, length: int, accurate: bool = True) -> None:
        stack = model.stack
        if not isinstance(stack, InvertibleStack):
            raise NotEnclosed("the rounding of a stack without a certificate is not bounded")
        self.accurate, self.padding = accurate, model.embedding.padding
        self.symbols = weight(model.embedding.token.weight)
        self.positions = weight(model.embedding.position)
        ones = torch.ones(1, model.head.in_features, device=self.symbols.middle.device)
        factor, shift = (paired(constant(t[0])) for t in (ones, 0 * ones))
        writes = constant(ones[:0]).middle
        self.steps: list[Step] = []
        weights = stack.weights()
        for name, layer in stack.layers():
            is_scaling = isinstance(layer, ActivationNorm)
            scaling = weights[name] if is_scaling else weights[name].scaling
            inside = factor, shift
            if scaling is not None:
                by = weight(scaling.scale)
                inside = factor * by, shift * by + weight(scaling.shift)
            if is_scaling:
                factor, shift = inside
                continue
            branch = enclosed_branch(name, layer.branch, length, weights[name].branch)
            self.steps.append(Step(branch, layer.input_radius, *inside, writes, accurate))
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
    """A branch, and the channels as it reads them: in a ball, if there is a radius."""

    def __init__(
        self,
        branch: Branch,
        radius: float | None,
        factor: Pair,
        shift: Pair,
        writes: Tensor,
        accurate: bool,
    ) -> None:
        super().__init__(factor, shift, writes, accurate)
        self.branch, self.radius = branch, radius
        matrices = [] if radius is not None else branch.weights[:-1]
        self.to_reads = [sizes_of(writes * factor.middle, w.middle) for w in matrices]

    def read(self, x: Pair, errors: Tensor, count: int | None) -> list[Enclosure]:
        """(A x + B) W for the first W of the branch, or for all."""
        matrices = self.branch.reads[:count]
        if self.radius is not None:
            seen = self.state(x, errors).into_ball(self.radius)
            return [seen.matmul(w) for w in matrices]
        u = self.seen(x)
        pairs = zip(matrices, self.to_reads, strict=False)
        return [spread(u.matmul(w), errors, sizes) for w, sizes in pairs]


def sizes_of(x: Tensor, y: Tensor) -> Float[Tensor, "inner out"]:
    """|x y| rounded up, in float32, for entries known to a relative error of 8 u each."""
    rounding = 4 * (x.shape[-1] + 32) * U * (x.abs() @ y.abs())
    return outward((x @ y).abs().add_(rounding).float())


def spread(x: Enclosure, errors: Tensor, sizes: Float[Tensor, "inner out"]) -> Enclosure:
    """x whose entries may further be off by errors times matrices of these sizes."""
    further = errors @ sizes * (1 + 2.0**-22 * (len(sizes) + 8))
    return replace(x, radius=outward(x.radius + further))
