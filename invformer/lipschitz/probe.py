"""The local Lipschitz constants of every residual branch at a fixed text, step after step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.lipschitz.attention_jacobians import StackedBoundedAttention, StackedL2Attention
from invformer.lipschitz.jacobians import (
    Branch,
    StackedBranches,
    StackedFeedForward,
    StackedModules,
    acts_per_token,
)
from invformer.lipschitz.power_iteration import (
    LipschitzEstimate,
    PowerIteration,
    RowIteration,
    Step,
)
from invformer.nn.attention import TiedL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.branch import LipschitzBranch
from invformer.nn.coupling import CouplingStack
from invformer.nn.feed_forward import ContractiveFeedForward
from invformer.nn.residual import InvertibleResidual
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import CharTransformer, PreNormBlock
from invformer.numerics.norms import Norm

# The norm of a certificate, or max_i ‖∂f_i/∂x_i‖₂, which is what a causal certificate bounds.
Measured = Literal["token_max", "frobenius", "entry_max", "diagonal_block"]
PARTS = ("attention", "feed_forward")
# Steps of power iteration of the first estimate, which starts at random.
FIRST_STEPS = 16
# Up to this many tokens an estimate takes one thread.
SHORT = 32


class Part(NamedTuple):
    """The attentions or the feed-forwards of all blocks, and the iteration that follows them."""

    layers: slice
    branches: list[Branch]
    residual_layers: list[InvertibleResidual]
    input_radius: float | None
    iteration: PowerIteration | RowIteration


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    An estimate takes one step of power iteration (:class:`.PowerIteration`) from the vectors of the
    estimate before, at the model's present weights: while these move slowly, estimates follow the
    true constants. One forward pass of the text shows the branches their inputs; from there on the
    attentions of all blocks are stacked, and so are the feed-forwards, so that the number of
    launches does not depend on the depth. Nothing waits for the device.

    Args:
        model: the language model, all blocks built alike; its weights may change between calls.
        tokens: the probe text, (sequences, N), on the model's device.
        measured: the norm of input and output, or the diagonal blocks; None is what the stack's
            certificate is about, and token_max for baselines.
        seed: of the start vectors.
    """

    def __init__(
        self,
        model: CharTransformer,
        tokens: Integer[Tensor, "sequences tokens"],
        measured: Measured | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.measured: Measured = measured or certified_in(model)
        self.blocks = list(model.stack.blocks)
        self.names = [f"block_{i:02d}/{part}" for i in range(len(self.blocks)) for part in PARTS]
        weight = model.embedding.position
        like = {"dtype": weight.dtype, "device": weight.device}
        self.has_started = False
        streams = 2 if isinstance(model.stack, CouplingStack) else 1
        size = (*tokens.shape, model.head.in_features // streams)
        self.norm: Norm = "token_max" if self.measured == "diagonal_block" else self.measured
        self.parts: list[Part] = []
        for index, part in enumerate(PARTS):
            layers = [getattr(block, part) for block in self.blocks]
            branches = [layer.branch if model.is_invertible else layer for layer in layers]
            per_token = self.measured == "diagonal_block" or acts_per_token(branches[0])
            shape = torch.Size((len(branches), *size))
            if self.norm == "token_max" and not per_token:
                iteration = RowIteration(shape, seed=seed, **like)
            else:
                per_token = per_token and self.norm != "entry_max"
                iteration = PowerIteration(shape, self.norm, per_token, seed=seed, **like)
            radius = getattr(layers[0], "input_radius", None)
            residual = layers if model.is_invertible else []
            at = slice(index, None, len(PARTS))
            self.parts.append(Part(at, branches, residual, radius, iteration))
        pairs = zip(*(part.branches for part in self.parts), strict=True)
        self.branches = [branch for pair in pairs for branch in pair]
        self.knows_products = all(isinstance(branch, tuple(STACKED)) for branch in self.branches)
        targets = [getattr(branch, "lipschitz_target", math.inf) for branch in self.branches]
        self.target = max(targets)
        self.targets = torch.tensor(targets, dtype=torch.float64, device=weight.device)

    @torch.no_grad()
    def stacked(self, weights: StackWeights | None = None) -> list[StackedBranches]:
        """Both parts of the blocks at their inputs; None computes the weights of the stack."""
        weights = weights or self.model.weights()
        parts = [self.empty(part, weights) for part in self.parts]
        x, stack = self.model.embedding(self.tokens), self.model.stack
        if not isinstance(stack, InvertibleStack) or weights is None:
            for block in stack.blocks:
                assert isinstance(block, PreNormBlock)
                x = block.compose(
                    x, lambda f, u, block=block: parts[f is block.feed_forward].forward(u)
                )
            return parts
        of_name = {name: parts[index % len(PARTS)] for index, name in enumerate(self.names)}
        for name, layer in stack.layers():
            x = of_name[name].forward(x) if name in of_name else layer(x, weights[name])
        return parts

    def empty(self, part: Part, weights: StackWeights | None) -> StackedBranches:
        """The branches of a part before they have seen their inputs."""
        num_tokens = self.tokens.shape[-1]
        if weights is None:
            return StackedModules(part.branches, num_tokens)
        layers = [weights[name] for name in self.names[part.layers]]
        scale = None
        if layers[0].centre is not None:  # D is folded into the weights
            scalings = [layer.scaling for layer in part.residual_layers]
            scale = torch.stack([s.log_scale for s in scalings if s is not None]).exp()
        stacked = stacked_class(part.branches[0])
        return stacked(part.branches, layers, num_tokens, part.input_radius, scale)

    def inputs(self) -> list[Float[Tensor, "sequences tokens width"]]:
        """What every branch sees at the text, in the order of ``names``."""
        parts = [[stacked.seen(u) for u in stacked.inputs] for stacked in self.stacked()]
        return [x for pair in zip(*parts, strict=True) for x in pair]

    def steps(self, num_steps: int, weights: StackWeights | None = None) -> Iterator[Step]:
        """The last of some steps of power iteration, for each part."""
        for part, stacked in zip(self.parts, self.stacked(weights), strict=True):
            jacobian: Any = stacked.rows
            if isinstance(part.iteration, PowerIteration):
                diagonal = self.measured == "diagonal_block"
                jacobian = stacked.diagonal() if diagonal else stacked.whole()
            for _ in range(num_steps - 1):
                part.iteration.step(jacobian)
            yield part.iteration.step(jacobian)

    def values(
        self, num_steps: int = 1, weights: StackWeights | None = None
    ) -> Float[Tensor, "branches"]:
        """One estimate per branch in the order of ``names``, the largest over the sequences.

        Args:
            num_steps: steps of power iteration; the first estimate takes ``FIRST_STEPS`` at least.
            weights: of the stack, where a training step has them already.
        """
        if not self.has_started:
            self.has_started, num_steps = True, max(num_steps, FIRST_STEPS)
        # Less for every operation, but nothing can be differentiated.
        known = weights is not None and self.norm == "token_max" and self.knows_products
        mode = torch.inference_mode() if known else torch.no_grad()
        with mode, one_thread() if self.tokens.numel() <= SHORT else nullcontext():
            parts = [step.gains.amax((-2, -1)) for step in self.steps(num_steps, weights)]
            return torch.stack(parts, -1).flatten()

    @torch.no_grad()
    def estimate(self, num_steps: int = 1, rtol: float = 0.1) -> dict[str, LipschitzEstimate]:
        """An estimate per branch with its evidence, (sequences,)."""
        found: dict[str, LipschitzEstimate] = {}
        for part, (gains, x, residual) in zip(self.parts, self.steps(num_steps), strict=True):
            best = gains.argmax(-1, keepdim=True)
            vectors = x.gather(2, best[..., None, None].expand(-1, -1, 1, *x.shape[-2:])).squeeze(2)
            each = gains.amax(-1), residual().gather(2, best).squeeze(2), vectors
            for name, value, left, vector in zip(self.names[part.layers], *each, strict=True):
                found[name] = LipschitzEstimate(value, left, left <= rtol, self.norm, vector)
        return {name: found[name] for name in self.names}

    def bounds(self) -> Float[Tensor, "branches"]:
        """c of every branch less any correction: what the normalisation keeps; inf for baselines.

        In the norm of the certificate, in exact arithmetic. A certificate proves it.
        """
        corrections = [b.correction for b in self.branches if isinstance(b, LipschitzBranch)]
        return torch.stack(corrections).double() * self.targets if corrections else self.targets

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors that the next estimate starts from, which are changed in place."""
        held: dict[str, Tensor] = {}
        for name, part in zip(PARTS, self.parts, strict=True):
            held |= {f"{name}/{key}": t for key, t in part.iteration.state_dict().items()}
        return held

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved tensors.

        Raises:
            ValueError: they are not those of this probe.
        """
        held = self.state_dict()
        if differing := held.keys() ^ state.keys():
            raise ValueError(f"{min(differing):.60} is missing or unknown")
        for name, tensor in held.items():
            given = state[name]
            if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{name} does not fit the model")
            tensor.copy_(given)
        self.has_started = True


STACKED: dict[type, type[StackedBranches]] = {
    TiedL2Attention: StackedL2Attention,
    BoundedAttention: StackedBoundedAttention,
    ContractiveFeedForward: StackedFeedForward,
}


def stacked_class(branch: Branch) -> type[StackedBranches]:
    """The class that knows the products of branches like this one."""
    known = (STACKED[kind] for kind in STACKED if isinstance(branch, kind))
    return next(known, StackedBranches)


@contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU small operations lose more by waiting for a second thread than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def certified_in(model: CharTransformer) -> Measured:
    """What the stack's certificate bounds."""
    if not isinstance(model.stack, InvertibleStack):
        return "token_max"
    return "diagonal_block" if model.stack.kind == "causal" else model.stack.norm
