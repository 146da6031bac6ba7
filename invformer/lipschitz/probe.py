"""Local Lipschitz constants of every residual branch at a fixed probe text, step after step."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.lipschitz.branch_jacobians import BranchGroup, branch_jacobians
from invformer.lipschitz.power_iteration import LipschitzEstimate
from invformer.lipschitz.tracking import TrackedNorm, Tracker
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.linear_map import LinearMap

# Norms, and max_i ‖∂f_i/∂x_i‖₂, which is no norm of J.
Measured = Literal["token_max", "frobenius", "own_token"]
# What a group's name ends with where the vectors are those of its diagonal blocks.
OWN_TOKEN = "/own_token"


@dataclass(frozen=True)
class Look:
    """What one call finds out about a group: per norm a (branches, sequences) estimate.

    ``own_token`` estimates max_i ‖∂f_i/∂x_i‖₂, what a causal certificate bounds.
    """

    names: tuple[str, ...]
    estimates: tuple[LipschitzEstimate, ...]
    own_token: LipschitzEstimate | None = None

    def by_norm(self, norms: tuple[TrackedNorm, ...]) -> dict[Measured, LipschitzEstimate]:
        """Everything that was estimated, by name."""
        found: dict[Measured, LipschitzEstimate] = dict(zip(norms, self.estimates, strict=True))
        if self.own_token is not None:
            found["own_token"] = self.own_token
        return found


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    Each call takes ``num_steps`` steps of power iteration in all norms at once, starting from the
    vectors of the call before: while the weights move slowly the estimates follow the true local
    constants. Branches of one shape are stacked and share products. Nothing waits for the device.
    In a stack under a causal certificate the diagonal blocks are followed too.

    Args:
        model: the language model; its weights may change between calls.
        tokens: the probe text, (sequences, N).
        norms: in which norms to estimate.
        num_steps: power iteration steps, of one pair of products, per call.
        first_steps: the same for the first call, which starts at random; None is ``num_steps``.
        scouts: tokens that a step looks at besides the largest, see ``Tracker``.
        seed: of the start vectors.
    """

    def __init__(
        self,
        model: CharTransformer,
        tokens: Integer[Tensor, "sequences tokens"],
        norms: tuple[TrackedNorm, ...] = ("token_max", "frobenius"),
        num_steps: int = 1,
        first_steps: int | None = None,
        scouts: int = 2,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.norms = norms
        self.num_steps = num_steps
        self.first_steps = num_steps if first_steps is None else first_steps
        self.scouts = scouts
        self.seed = seed
        self.trackers: dict[str, Tracker] = {}

    def estimate(self) -> dict[Measured, dict[str, LipschitzEstimate]]:
        """One warm-started estimate per norm and branch; values are (sequences,) on the device."""
        found: dict[Measured, dict[str, LipschitzEstimate]] = {norm: {} for norm in self.norms}
        for look in self.look():
            for norm, estimate in look.by_norm(self.norms).items():
                for position, name in enumerate(look.names):
                    found.setdefault(norm, {})[name] = select(estimate, position)
        return found

    @torch.no_grad()
    def look(self) -> list[Look]:
        """The same, branches of one shape together."""
        num_vectors = self._tracker(self.norms).num_vectors
        groups = branch_jacobians(self.model, self.tokens, num_vectors)
        return [self._look(group) for group in groups]

    def _look(self, group: BranchGroup) -> Look:
        key = group.names[0]
        estimates = self._follow(key, self.norms, group.jacobian, group.per_token)
        if not self.follows_own_tokens or group.own_token is None:
            return Look(group.names, estimates)
        if not self.follows_apart(group):
            return Look(group.names, estimates, estimates[self.norms.index("token_max")])
        (own_token,) = self._follow(key + OWN_TOKEN, ("token_max",), group.own_token, True)
        return Look(group.names, estimates, own_token)

    def follows_apart(self, group: BranchGroup) -> bool:
        """Whether diagonal blocks have vectors of their own: they are not the Jacobian followed."""
        followed = group.per_token and "token_max" in self.norms
        return self.follows_own_tokens and group.own_token is not None and not followed

    def _follow(
        self, key: str, norms: tuple[TrackedNorm, ...], jacobian: LinearMap, per_token: bool
    ) -> tuple[LipschitzEstimate, ...]:
        num_steps = self.num_steps if key in self.trackers else self.first_steps
        tracker = self.trackers.setdefault(key, self._tracker(norms))
        for _ in range(num_steps - 1):
            tracker.look(jacobian, per_token)
        return tracker.look(jacobian, per_token)

    def _tracker(self, norms: tuple[TrackedNorm, ...]) -> Tracker:
        return Tracker(norms, scouts=self.scouts, seed=self.seed)

    @property
    def follows_own_tokens(self) -> bool:
        """Whether the stack's certificate is about diagonal blocks."""
        return isinstance(self.model.stack, InvertibleStack) and self.model.stack.kind == "causal"

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The warm-started vectors of every group."""
        return {key: tracker.state_dict() for key, tracker in self.trackers.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Continue from saved vectors."""
        device = self.tokens.device
        for key, saved in state.items():
            norms = ("token_max",) if key.endswith(OWN_TOKEN) else self.norms
            self.trackers[key] = self._tracker(norms)
            self.trackers[key].load_state_dict(saved, device)


def select(estimate: LipschitzEstimate, position: int) -> LipschitzEstimate:
    """One branch's share of a group's estimate."""
    return LipschitzEstimate(
        value=estimate.value[position],
        residual=estimate.residual[position],
        num_steps=estimate.num_steps,
        converged=estimate.converged[position],
        norm=estimate.norm,
        vector=estimate.vector[position],
    )
