"""The local Lipschitz constants of every residual branch at a fixed text, step after step."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.lipschitz.jacobians import (
    Branch,
    Jacobians,
    acts_per_token,
    in_ball,
    of_branches,
    of_modules,
    residual_branches,
    scaled,
)
from invformer.lipschitz.power_iteration import LipschitzEstimate, PowerIteration
from invformer.nn.branch import LipschitzBranch
from invformer.nn.coupling import CouplingStack
from invformer.nn.residual import InvertibleResidual, ResidualWeights
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import CharTransformer
from invformer.numerics.ball import to_ball
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm, dual_vector, stationarity

# The norm of a certificate, or max_i ‖∂f_i/∂x_i‖₂, which is what a causal certificate bounds.
Measured = Literal["token_max", "frobenius", "entry_max", "diagonal_block"]
PARTS = ("attention", "feed_forward")
# Steps of power iteration of the first estimate, which starts at random.
FIRST_STEPS = 16


class Part(NamedTuple):
    """The attentions or the feed-forwards of all blocks, and the iteration that follows them."""

    layers: slice
    branches: list[Branch]
    residual_layers: list[InvertibleResidual]
    input_radius: float | None
    iteration: PowerIteration


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    An estimate takes one step of power iteration (:class:`.PowerIteration`) from the vectors of the
    estimate before, at the model's present weights: while these move slowly, estimates follow the
    true constants. The attentions of all blocks are stacked, and so are the feed-forwards: beside
    one forward pass of the text, the number of launches does not depend on the depth. Nothing waits
    for the device.

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
        self.measured = measured or certified_in(model)
        self.blocks = list(model.stack.blocks)
        self.names = [f"block_{i:02d}/{part}" for i in range(len(self.blocks)) for part in PARTS]
        weight = model.embedding.position
        like = {"dtype": weight.dtype, "device": weight.device}
        self.has_started = False
        streams = 2 if isinstance(model.stack, CouplingStack) else 1
        size = (*tokens.shape, model.head.in_features // streams)
        norm: Norm = "token_max" if self.measured == "diagonal_block" else self.measured
        self.parts: list[Part] = []
        for index, part in enumerate(PARTS):
            layers = [getattr(block, part) for block in self.blocks]
            branches = [layer.branch if model.is_invertible else layer for layer in layers]
            per_token = self.measured == "diagonal_block" or acts_per_token(branches[0])
            iteration = PowerIteration(
                torch.Size((len(branches), *size)), norm, per_token and norm != "entry_max",
                seed=seed, **like,
            )  # fmt: skip
            radius = getattr(layers[0], "input_radius", None)
            residual = layers if model.is_invertible else []
            at = slice(index, None, len(PARTS))
            self.parts.append(Part(at, branches, residual, radius, iteration))
        pairs = zip(*(part.branches for part in self.parts), strict=True)
        self.branches = [branch for pair in pairs for branch in pair]
        targets = [getattr(branch, "lipschitz_target", math.inf) for branch in self.branches]
        self.target = max(targets)
        self.targets = torch.tensor(targets, dtype=torch.float64, device=weight.device)

    @torch.no_grad()
    def jacobians(self, weights: StackWeights | None = None) -> list[Jacobians]:
        """Those of both parts of the blocks; None computes the weights of the stack."""
        weights = weights or self.model.weights()
        inputs = self.inputs(weights)
        found: list[Jacobians] = []
        for part in self.parts:
            names = self.names[part.layers]
            x = torch.stack([inputs[name] for name in names])
            num_vectors = part.iteration.num_vectors
            if weights is None:
                found.append(of_modules(part.branches, x, num_vectors))
                continue
            of_layers: list[ResidualWeights] = [weights[name] for name in names]
            scale = self.scale(part)
            of_each = [w.branch for w in of_layers]
            centres = [w.centre for w in of_layers if w.centre is not None]
            if centres:
                x = x + torch.stack(centres)[:, None, None]
            elif scale is not None:
                shifts = [w.scaling.shift for w in of_layers if w.scaling is not None]
                x, scale = torch.addcmul(torch.stack(shifts)[:, None, None], x, scale), None
            if part.input_radius is None:
                jacobians = of_branches(part.branches, of_each, x, num_vectors)
            else:
                entry = to_ball(x / part.input_radius)
                jacobians = of_branches(
                    part.branches, of_each, entry.u * part.input_radius, num_vectors
                )
                jacobians = in_ball(jacobians, entry)
            # Where D is folded into the weights they are of D⁻¹ f(D ·), whose Jacobian is D⁻¹ J D.
            found.append(jacobians if scale is None else scaled(jacobians, scale))
        return found

    def inputs(self, weights: StackWeights | None) -> dict[str, Tensor]:
        """The stream in front of every residual layer, by one forward pass."""
        x = self.model.embedding(self.tokens)
        if weights is None:
            return {name: at for name, _, at in residual_branches(self.model, x)}
        found: dict[str, Tensor] = {}
        assert isinstance(self.model.stack, InvertibleStack)
        for name, layer in self.model.stack.layers():
            if isinstance(layer, InvertibleResidual):
                found[name] = x
            if name != self.names[-1]:
                x = layer(x, weights[name])
        return found

    def scale(self, part: Part) -> Float[Tensor, "branches 1 1 width"] | None:
        """D of every layer, where there are scalings."""
        scalings = [layer.scaling for layer in part.residual_layers if layer.scaling is not None]
        if not scalings:
            return None
        return torch.stack([each.log_scale for each in scalings]).exp()[:, None, None]

    @torch.no_grad()
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
        values = self.targets.new_empty(len(self.names))
        for part, jacobians in zip(self.parts, self.jacobians(weights), strict=True):
            jacobian = self.followed(jacobians)
            for _ in range(num_steps - 1):
                part.iteration.step(jacobian)
            gains, _ = part.iteration.step(jacobian)
            values[part.layers] = gains.amax((-2, -1))
        return values

    def followed(self, jacobians: Jacobians) -> LinearMap:
        """The Jacobian, or its diagonal blocks."""
        if self.measured != "diagonal_block":
            return jacobians.whole
        assert jacobians.diagonal is not None
        return jacobians.diagonal

    @torch.no_grad()
    def estimate(self, num_steps: int = 1, rtol: float = 0.1) -> dict[str, LipschitzEstimate]:
        """An estimate per branch with its evidence, (sequences,)."""
        found: dict[str, LipschitzEstimate] = {}
        for part, jacobians in zip(self.parts, self.jacobians(), strict=True):
            norm, jacobian = part.iteration.norm, self.followed(jacobians)
            for _ in range(num_steps - 1):
                part.iteration.step(jacobian)
            gains, x = part.iteration.step(jacobian)
            w = jacobian.vjp(dual_vector(jacobian.jvp(x), norm))
            residuals = stationarity(x, w, gains, norm)
            best = gains.argmax(-1, keepdim=True)
            vectors = x.gather(2, best[..., None, None].expand(-1, -1, 1, *x.shape[-2:])).squeeze(2)
            each = zip(gains.amax(-1), residuals.gather(2, best).squeeze(2), vectors, strict=True)
            for name, (value, residual, vector) in zip(self.names[part.layers], each, strict=True):
                found[name] = LipschitzEstimate(value, residual, residual <= rtol, norm, vector)
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


def certified_in(model: CharTransformer) -> Measured:
    """What the stack's certificate bounds."""
    if not isinstance(model.stack, InvertibleStack):
        return "token_max"
    return "diagonal_block" if model.stack.kind == "causal" else model.stack.norm
