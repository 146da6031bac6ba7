"""The local Lipschitz constants of every residual branch at a fixed text, step after step."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.branches.jacobian import Measured, StackedBranches
from invformer.kernels.cuda_graph import Replayed
from invformer.lipschitz import compiled
from invformer.lipschitz.power_iteration import TOKENS_AT_ONCE, PowerIteration, Step
from invformer.nn.coupling import CouplingStack
from invformer.nn.residual import FoldedWeights
from invformer.nn.stack import FoldedStackWeights, InvertibleStack, full_name
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Norm
from invformer.numerics.precision import changed

PARTS = ("attention", "feed_forward")
# Steps of power iteration of the first estimate, which starts at random.
FIRST_STEPS = 16
# Up to this many tokens an estimate takes one thread.
SHORT = 32
# Estimates are lowered by so many ε of their format.
ROUNDINGS = 16


class Part(NamedTuple):
    """The attentions or the feed-forwards of all blocks, and the iteration that follows them."""

    names: list[str]
    layers: list[Any]
    branches: list[Any]
    iteration: PowerIteration


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    An estimate takes one step of power iteration (:class:`.PowerIteration`) from the vectors of the
    estimate before, at the model's present weights: while these move slowly, estimates follow the
    true constants. One forward pass of the text shows the branches their inputs; from there on the
    attentions of all blocks are stacked, and so are the feed-forwards, so that the number of
    launches does not depend on the depth. Nothing waits for the device. On a CPU with a C++
    compiler one call of compiled code does the same (``kernels/cpp/estimate.cpp``).

    Args:
        model: the language model, all blocks built alike; its weights may change between calls.
        tokens: the probe text, (sequences, N), on the model's device.
        measured: the norm of input and output, or the diagonal blocks; None is what the stack's
            certificate is about, and token_max for baselines.
        seed: of the start vectors.
        thorough: whether a step advances all tokens, not some, of maps that do not mix tokens.
        replays: on a GPU, replay estimates as CUDA graphs; parameters have to stay at their
            addresses.
    """

    def __init__(
        self,
        model: CharTransformer,
        tokens: Integer[Tensor, "sequences tokens"],
        measured: Measured | None = None,
        seed: int = 0,
        thorough: bool = False,
        replays: bool = False,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.measured: Measured = measured or certified_in(model)
        blocks = list(model.stack.blocks)
        like = {"dtype": model.embedding.position.dtype, "device": tokens.device}
        streams = 2 if isinstance(model.stack, CouplingStack) else 1
        shape = torch.Size((len(blocks), *tokens.shape, model.head.in_features // streams))
        self.parts: list[Part] = []
        for part in PARTS:
            names = [full_name(i, part) for i in range(len(blocks))]
            layers = [getattr(block, part) for block in blocks]
            branches = [layer.branch if model.is_invertible else layer for layer in layers]
            kinds = {(type(f), *(w.shape for w in f.parameters())) for f in branches}
            invertible = layers if model.is_invertible else []
            groups = {(layer.group(), layer.input_radius) for layer in invertible}
            if max(len(kinds), len(groups)) > 1:
                raise ValueError(f"{part} layers of different kinds or shapes have no estimates")
            norm: Norm = "token_max"  # of rows; diagonal blocks are parts of them
            # A map of single tokens is as large in frobenius as its largest token.
            per_token = branches[0].is_token_wise
            alone = per_token and self.measured == "frobenius"
            if self.measured != "diagonal_block" and not alone:
                norm = self.measured
            many = thorough and (per_token or self.measured == "diagonal_block")
            at_once = tokens.shape[-1] if many else TOKENS_AT_ONCE
            iteration = PowerIteration(shape, norm, seed=seed, at_once=at_once, **like)
            self.parts.append(Part(names, layers, branches, iteration))
        self.names = [full_name(i, part) for i in range(len(blocks)) for part in PARTS]
        self.branches = [branch for part in self.parts for branch in part.branches]
        self.target = max(getattr(branch, "lipschitz_target", math.inf) for branch in self.branches)
        self.iterations = [part.iteration for part in self.parts]
        self.is_compiled = compiled.can_take(model, self.branches, self.iterations)
        self.compiled = compiled.CompiledEstimates(model, tokens, self.iterations)
        self.has_started = False
        # Recorded twice: with weights that are given, and with those that it computes.
        self.replayed = {given: Replayed(self.by_torch) for given in (True, False) if replays}

    @torch.no_grad()
    def stacked(self, weights: FoldedStackWeights | None = None) -> list[StackedBranches]:
        """Both parts of the blocks at their inputs; None computes the weights of the stack."""
        weights = weights or self.model.weights()
        parts, of_layer = [], {}
        for names, layers, branches, _ in self.parts:
            own: list[Any] = [None for _ in names]
            options: dict[str, Any] = {}
            if weights is not None:
                own = [weights[name][0] for name in names]
                options["input_radius"] = layers[0].input_radius
                if isinstance(weights[names[0]], FoldedWeights):
                    scales = torch.stack([layer.scaling.log_scale for layer in layers]).exp()
                    options["scale"] = scales[:, None]
            at_text = branches[0].stacked(branches, own, self.tokens.shape[-1], **options)
            parts.append(at_text)
            of_layer |= dict.fromkeys(layers, at_text)
        x = self.model.embedding(self.tokens)
        self.model.through_stack(x, lambda layer, u, *_: of_layer[layer].forward(u), weights)
        return parts

    def steps(self, num_steps: int, stacked: Sequence[StackedBranches]) -> Iterator[Step]:
        """The last of some steps of power iteration, for each part."""
        for part, at in zip(self.parts, stacked, strict=True):
            if part.iteration.norm == "frobenius":
                whole = at.whole()
                products = lambda _, whole=whole: whole  # noqa: E731
            else:
                products = partial(at.rows, diagonal=self.measured == "diagonal_block")
            for _ in range(num_steps - 1):
                part.iteration.step(products)
            yield part.iteration.step(products)

    @torch.no_grad()
    def values(
        self,
        weights: FoldedStackWeights | None = None,
        stacked: Sequence[StackedBranches] | None = None,
        times: float = 1.0,
    ) -> Float[Tensor, "branches"]:
        """One estimate per branch in the order of ``names``, the largest over the sequences.

        The first one takes ``FIRST_STEPS``. ``weights`` are those of a training step. Compiled code
        advances so many ``times`` the usual rows, and chooses those of attention better. What
        local bounds are compared with is estimated from the same ``stacked`` branches: two
        computations of one pre-activation may round to different sides of a kink.
        """
        num_steps, self.has_started = 1 if self.has_started else FIRST_STEPS, True
        is_short = self.tokens.numel() <= SHORT
        if self.is_compiled and stacked is None:
            weights = weights or self.model.weights()
            diagonal = self.measured == "diagonal_block"
            threads = 1 if is_short else torch.get_num_threads()
            factor = rounding_factor(self.iterations[0].left)
            return self.compiled.advance(weights, num_steps, diagonal, threads, times, factor)
        if self.replayed and num_steps == 1 and stacked is None:
            return self.replayed[weights is not None](weights).clone()  # the next writes there
        # On a CPU small operations lose more by waiting for a second thread than it computes.
        one_thread = changed(torch.get_num_threads, torch.set_num_threads, 1)
        with one_thread if is_short else nullcontext():
            return self.by_torch(weights, num_steps, stacked)

    def by_torch(
        self,
        weights: FoldedStackWeights | None,
        num_steps: int = 1,
        stacked: Sequence[StackedBranches] | None = None,
    ) -> Float[Tensor, "branches"]:
        """The estimates by operations of PyTorch."""
        steps = self.steps(num_steps, stacked or self.stacked(weights))
        parts = [step.gains.amax((-2, -1)) for step in steps]
        return torch.stack(parts, -1).flatten() * rounding_factor(parts[0])

    @torch.no_grad()
    def estimate(
        self, num_steps: int = 1, stacked: Sequence[StackedBranches] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """An estimate per branch, and how far its vector is from stationary, (sequences,)."""
        found = {}
        steps = self.steps(num_steps, stacked or self.stacked())
        for part, (gains, residual) in zip(self.parts, steps, strict=True):
            best = gains.argmax(-1, keepdim=True)
            values = gains.gather(2, best).squeeze(2) * rounding_factor(gains)
            residuals = residual().gather(2, best).squeeze(2)
            found |= zip(part.names, zip(values, residuals, strict=True), strict=True)
        return {name: found[name] for name in self.names}

    @torch.no_grad()
    def local_bounds(
        self, tight: bool = False, stacked: Sequence[StackedBranches] | None = None
    ) -> Float[Tensor, "branches"]:
        """Upper bounds on what is estimated, the largest over the sequences, in float64.

        inf where none is known. Cost: a spectral norm of the size of a head for every token, in as
        many launches at any depth. ``tight`` spends an eigenproblem or a spectral norm of D × D
        matrices per token, branch by branch, unless that takes too long.
        """
        parts = stacked or self.stacked()
        bounds = [at_text.local_bounds(self.measured, tight).double() for at_text in parts]
        return torch.stack(bounds, -1).flatten()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Estimate inside without moving the vectors that the next estimate starts from."""
        before = {name: vector.clone() for name, vector in self.state_dict().items()}
        has_started = self.has_started
        yield
        self.load_state_dict(before)
        self.has_started = has_started

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors that the next estimate starts from, which are changed in place."""
        held: dict[str, Tensor] = {}
        for name, part in zip(PARTS, self.parts, strict=True):
            held |= {f"{name}/{key}": t for key, t in part.iteration.state_dict().items()}
        return held

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved tensors; ValueError if they are not those of this probe."""
        held = self.state_dict()
        forms = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in (state, held)]
        if forms[0] != forms[1]:
            raise ValueError("the Lipschitz probe: its vectors do not fit the model")
        for name, vector in held.items():
            vector.copy_(state[name])
        self.has_started = True


def rounding_factor(gains: Tensor) -> float:
    """1 − 16 ε: a float32 gain may exceed the exact one by its rounding, 0.3 ε in measurements."""
    return 1 - ROUNDINGS * torch.finfo(gains.dtype).eps


def certified_in(model: CharTransformer) -> Measured:
    """The norm of the stack's certificate, or ``diagonal_block``; token_max for baselines."""
    if not isinstance(model.stack, InvertibleStack):
        return "token_max"
    return "diagonal_block" if model.stack.kind == "causal" else model.stack.norm
