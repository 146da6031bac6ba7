"""The local Lipschitz constants of every residual branch at a fixed text, step after step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.lipschitz.jacobians import (
    Branch,
    Jacobians,
    acts_per_token,
    in_ball,
    kind_of,
    stacked,
)
from invformer.lipschitz.power_iteration import SCOUTS, LipschitzEstimate, PowerIteration
from invformer.nn.branch import LipschitzBranch
from invformer.nn.residual import InvertibleBlock
from invformer.nn.scaling import ActivationNorm, DiagonalScaling
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer, PreNormBlock
from invformer.numerics.ball import to_ball
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm, dual_vector, stationarity

# The norm of a certificate, or max_i ‖∂f_i/∂x_i‖₂, which is what a causal certificate bounds.
Measured = Literal["token_max", "frobenius", "entry_max", "diagonal_block"]
# Sweeps over the stack for the inputs of one estimate.
SWEEPS = 4


class Layer(NamedTuple):
    """One residual layer x ↦ x + D⁻¹ f(ψ_R(D x + b)), and the norm behind it."""

    name: str
    branch: Branch
    scaling: DiagonalScaling | None = None
    norm: ActivationNorm | None = None
    input_radius: float | None = None


@dataclass
class Group:
    """Layers of one kind: their numbers in the stack, and the iteration that follows them."""

    at: slice | Tensor
    names: list[str]
    branches: list[Branch]
    input_radius: float | None
    iteration: PowerIteration


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    An estimate takes one step of power iteration (:class:`.PowerIteration`) from the vectors of the
    estimate before, at the model's present weights: while these move slowly, estimates follow the
    true constants. Branches of one kind and shape are stacked, so that the number of launches does
    not depend on the depth, and nothing waits for the device.

    The inputs of all branches are found together as well. A stack x_{l+1} = x_l + g_l(x_l) is
    x_l = x_0 + Σ_{j<l} g_j(x_j), which is iterated from the inputs of the estimate before: a sweep
    evaluates all g_j at once. After k sweeps the first k blocks are exact, and the error of the
    others shrinks like 1/k!. ``SWEEPS`` of them make every input of a stack of as many blocks
    exact, and the others to about the rounding of float32 while weights move by one step.

    Args:
        model: the language model; its weights may change between calls.
        tokens: the probe text, (sequences, N), on the model's device.
        measured: the norm of input and output, or the diagonal blocks; None is what the stack's
            certificate is about, and token_max for baselines.
        scouts: see :class:`.PowerIteration`.
        seed: of the start vectors.
    """

    def __init__(
        self,
        model: CharTransformer,
        tokens: Integer[Tensor, "sequences tokens"],
        measured: Measured | None = None,
        *,
        scouts: int = SCOUTS,
        seed: int = 0,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.measured = certified_in(model) if measured is None else measured
        self.layers = layers_of(model)
        self.names = [layer.name for layer in self.layers]
        weight = model.embedding.position
        like = {"dtype": weight.dtype, "device": weight.device}
        targets = [getattr(layer.branch, "lipschitz_target", math.inf) for layer in self.layers]
        self.target = max(targets)
        self.targets = torch.tensor(targets, dtype=torch.float64, device=weight.device)
        # The embedding of the text, and what each layer adds to it: their sums are the inputs.
        shape = (len(self.layers), *tokens.shape, model.head.in_features)
        self.parts = torch.zeros((len(self.layers) + 1, *shape[1:]), **like)
        self.is_settled = False
        diagonal = self.measured == "diagonal_block"
        norm: Norm = "token_max" if self.measured == "diagonal_block" else self.measured
        by_kind: dict[object, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_kind.setdefault((kind_of(layer.branch), layer.input_radius), []).append(index)
        self.groups: list[Group] = []
        for numbers in by_kind.values():
            branches = [self.layers[number].branch for number in numbers]
            per_token = diagonal or (acts_per_token(branches[0]) and norm != "entry_max")
            iteration = PowerIteration(
                torch.Size((len(numbers), *shape[1:])), norm, per_token,
                scouts=scouts, seed=seed, **like,
            )  # fmt: skip
            names = [self.names[number] for number in numbers]
            radius = self.layers[numbers[0]].input_radius
            at = places_of(numbers, weight.device)
            self.groups.append(Group(at, names, branches, radius, iteration))
        order = {number: g for g, numbers in enumerate(by_kind.values()) for number in numbers}
        # Sweeps after which everything is exact: blocks, where all are built alike.
        self.depth = 1 + sum(order[n + 1] <= order[n] for n in range(len(order) - 1))
        self.is_regular = all(len(group.names) == self.depth for group in self.groups)

    @torch.no_grad()
    def jacobians(self, settled: bool = False) -> list[Jacobians]:
        """Those of every group at the present weights, at inputs that are exact if ``settled``."""
        sweeps = self.depth if settled or not self.is_settled else min(SWEEPS, self.depth)
        self.is_settled = True
        self.parts[0] = self.model.embedding(self.tokens)
        scale, shift = coordinates(self.layers)
        kinds = [stacked(group.branches, self.tokens.shape[-1]) for group in self.groups]
        found: list[Jacobians] = []
        for sweep in range(sweeps):
            last = sweep == sweeps - 1
            # Blocks below are exact already, and those above need not be looked at to be so.
            members = slice(sweep, sweep + 1 if sweeps == self.depth else None)
            if last or not self.is_regular:
                members = slice(None)
            for group, kind in zip(self.groups, kinds, strict=True):
                x = self.parts.cumsum(0)[group.at][members]
                if scale is not None:
                    x = torch.addcmul(shift[group.at][members], x, scale[group.at][members])
                entry = None if group.input_radius is None else to_ball(x / group.input_radius)
                if entry is not None:
                    x = entry.u * group.input_radius
                y, jacobians = kind.apply(x, members)
                if scale is not None:
                    y = y / scale[group.at][members]
                self.put(group.at, members, y)
                if last:
                    made = jacobians(group.iteration.num_vectors)
                    found.append(made if entry is None else in_ball(made, entry))
        return found

    @torch.no_grad()
    def values(self, num_steps: int = 1, settled: bool = False) -> Float[Tensor, "branches"]:
        """One estimate per branch in the order of ``names``, the largest over the sequences.

        Args:
            num_steps: steps of power iteration.
            settled: see :meth:`jacobians`; the first estimate always is.
        """
        values = self.parts.new_empty(len(self.layers))
        for group, jacobians in zip(self.groups, self.jacobians(settled), strict=True):
            for _ in range(num_steps):
                gains, _ = group.iteration.step(self.followed(jacobians))
            values[group.at] = gains.amax((-2, -1))
        return values

    def followed(self, jacobians: Jacobians) -> LinearMap:
        """The Jacobian, or its diagonal blocks."""
        if self.measured != "diagonal_block":
            return jacobians.whole
        assert jacobians.diagonal is not None
        return jacobians.diagonal

    @torch.no_grad()
    def estimate(self, num_steps: int = 1, rtol: float = 0.1) -> dict[str, LipschitzEstimate]:
        """An estimate per branch with its evidence, (sequences,), at exact inputs."""
        found: dict[str, LipschitzEstimate] = {}
        for group, jacobians in zip(self.groups, self.jacobians(settled=True), strict=True):
            iteration, jacobian = group.iteration, self.followed(jacobians)
            for _ in range(num_steps):
                gains, x = iteration.step(jacobian)
            w = jacobian.vjp(dual_vector(jacobian.jvp(x), iteration.norm))
            residuals = stationarity(x, w, gains, iteration.norm)
            value, best = gains.max(-1, keepdim=True)
            residual = residuals.gather(2, best)
            x = x.gather(2, best[..., None, None].expand(-1, -1, 1, *x.shape[-2:]))
            for index, name in enumerate(group.names):
                found[name] = LipschitzEstimate(
                    value[index, :, 0], residual[index, :, 0], residual[index, :, 0] <= rtol,
                    iteration.norm, x[index, :, 0],
                )  # fmt: skip
        return {name: found[name] for name in self.names}

    def put(self, at: slice | Tensor, members: slice, y: Tensor) -> None:
        """Remember what some members of a group add to the stream."""
        added = self.parts[1:]
        if isinstance(at, slice):
            added[at][members] = y
        else:
            added[at[members]] = y

    def bounds(self) -> Float[Tensor, "branches"]:
        """c of every branch less any correction: what the normalisation keeps; inf for baselines.

        In the norm of the certificate, in exact arithmetic. A certificate proves it.
        """
        branches = [layer.branch for layer in self.layers]
        if not all(isinstance(branch, LipschitzBranch) for branch in branches):
            return self.targets
        return torch.stack([branch.correction for branch in branches]).double() * self.targets

    def state_dict(self) -> dict[str, Tensor]:
        """What the next estimate starts from, as the tensors that are changed in place."""
        held = {"parts": self.parts}
        for group in self.groups:
            held |= {f"{group.names[0]}/{k}": t for k, t in group.iteration.state_dict().items()}
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
        self.is_settled = True


def certified_in(model: CharTransformer) -> Measured:
    """What the stack's certificate bounds."""
    if not isinstance(model.stack, InvertibleStack):
        return "token_max"
    return "diagonal_block" if model.stack.kind == "causal" else model.stack.norm


def layers_of(model: CharTransformer) -> list[Layer]:
    """The residual layers of a stack, bottom first."""
    layers: list[Layer] = []
    for index, block in enumerate(model.stack.blocks):
        for name in ("attention", "feed_forward"):
            full, part = f"block_{index:02d}/{name}", getattr(block, name)
            if isinstance(block, PreNormBlock):
                layers.append(Layer(full, part))
                continue
            assert isinstance(block, InvertibleBlock)
            norm = getattr(block, f"{name}_norm", None)
            layers.append(Layer(full, part.branch, part.scaling, norm, part.input_radius))
    return layers


def coordinates(layers: Sequence[Layer]) -> tuple[Tensor | None, Tensor | None]:
    """D and b of every layer, (layers, 1, 1, D), in the coordinates of the embedding.

    Layers with a scaling have a D and b of their own. Where norms e^s x + b' stand between layers,
    D is the product of those below and b what they add. None where there is neither.
    """
    scalings = [layer.scaling for layer in layers if layer.scaling is not None]
    norms = [layer.norm for layer in layers if layer.norm is not None]
    if not scalings and not norms:
        return None, None
    log_scale = torch.stack([each.log_scale for each in scalings or norms])
    shift = torch.stack([each.shift for each in scalings or norms])
    if not scalings:
        above = log_scale.cumsum(0)
        log_scale = above - log_scale
        added = shift / above.exp()
        shift = log_scale.exp() * (added.cumsum(0) - added)
    return log_scale.exp()[:, None, None], shift[:, None, None]


def places_of(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of numbers, as a slice where they are evenly spaced."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if list(range(numbers[0], numbers[-1] + 1, step)) == list(numbers):
        return slice(numbers[0], numbers[-1] + 1, step)
    return torch.tensor(numbers, device=device)
