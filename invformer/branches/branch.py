"""What the program asks of a residual branch, and honest answers of one that says nothing."""

import math
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches.compiled import Fields, knows
from invformer.branches.enclosed import EnclosedBranch, NotEnclosed
from invformer.branches.jacobian import Measured, StackedBranches
from invformer.numerics.norms import Norm, Tokens
from invformer.numerics.residual_equation import Kind
from invformer.weights.scaling import ScalingWeights

# Constants normalised in the forward precision stay below their target after float64 certification.
ROUNDING_MARGIN = 1 - 2e-5
# Entries of the weights that are bounded at once, to limit memory: a float64 copy is 64 MiB.
NUMBERS_AT_ONCE = 2**23

# What is known of a forward pass: worth nothing for another one.
KNOWLEDGE = {
    *("stacked", "enclosed", "is_compiled", "compiled_fields", "reach", "folds_scaling"),
    *("next_outputs", "lipschitz_bound", "causal_bound", "bounds_of"),
}
# The named tuple of tensors that a branch computes with.
Weights = TypeVar("Weights", bound=tuple)


class AttentionCache:
    """Tensors a branch keeps of up to ``capacity`` tokens, for the outputs of later ones.

    An attention keeps keys and values, L2 attention one tensor for both, a feed-forward over
    several tokens the tokens themselves.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        # Subtracted from every key, if keys are kept relative to the first token's.
        self.origin: Tensor | None = None
        self._kept: list[Tensor] = []

    def append(
        self, *new: Float[Tensor, "*batch new channels"]
    ) -> list[Float[Tensor, "*batch tokens channels"]]:
        """Add some tokens; returns the tensors of all tokens so far, as views."""
        if not self._kept:
            self._kept = [x.new_empty(*x.shape[:-2], self.capacity, x.shape[-1]) for x in new]
        end = self.length + new[0].shape[-2]
        for kept, x in zip(self._kept, new, strict=True):
            kept[..., self.length : end, :] = x
        self.length = end
        return [kept[..., :end, :] for kept in self._kept]


class Branch(nn.Module):
    """A map f on sequences, and what is known of its ``forward`` beyond the values.

    Nothing is by default: its Jacobian is differentiated automatically, there is no local bound,
    its rounding is not bounded, and compiled code cannot take it. A class that replaces ``forward``
    starts from these defaults again, since what its base class knows is about another map.
    """

    # True, in the class itself, if its bounds are proven: a subclass may compute something else.
    is_proven: bool = False
    # Products with the Jacobians of several such branches, and their local bounds.
    stacked: type[StackedBranches] = StackedBranches

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_proven = vars(cls).get("is_proven", False)
        homes = {name: home for home in reversed(cls.__mro__) for name in vars(home)}
        for name in KNOWLEDGE & homes.keys():
            if not issubclass(homes[name], homes["forward"]):
                defaults = (vars(base) for base in cls.__mro__ if base.__module__ == __name__)
                setattr(cls, name, next(own[name] for own in defaults if name in own))

    @property
    def is_token_wise(self) -> bool:
        """True if f maps every token by itself."""
        return self.reach == 1

    @property
    def reach(self) -> int | None:
        """How many tokens an output is of, its own and those right before it; None: of any."""
        return None

    @property
    def is_compiled(self) -> bool:
        """True if compiled code takes the branch: it says how, and its positions are known."""
        has_fields = type(self).compiled_fields is not Branch.compiled_fields
        return has_fields and knows(getattr(self, "position", None))

    def compiled_fields(self, weights: Any) -> Fields:
        """What compiled code needs to know of the branch with these weights."""
        raise NotImplementedError

    def next_outputs(self, x: Tokens, past: AttentionCache, weights: Any = None) -> Tokens:
        """Outputs of the tokens after those in ``past``, to which the new ones are added.

        The default computes them from as many tokens as they are of, for any causal f.
        """
        seen = x
        if self.reach != 1:
            (seen,) = past.append(x)
        if self.reach is not None:
            seen = seen[..., -(x.shape[-2] + self.reach - 1) :, :]
        y = self(seen) if weights is None else self(seen, weights)
        return y[..., -x.shape[-2] :, :]

    @staticmethod
    def weights_of(branches: Sequence[Any]) -> list[Any]:
        """What the branches are called with beside their input; None where that is all."""
        return [None] * len(branches)

    def enclosed(self, weights: Any, length: int) -> EnclosedBranch:
        """f in enclosures of real numbers, for up to ``length`` tokens.

        NotEnclosed if its rounding is not bounded.
        """
        raise NotEnclosed(f"the rounding of a {type(self).__name__} is not bounded")


class LipschitzBranch(Branch, Generic[Weights]):
    """A branch f with a certified Lipschitz constant.

    The weights of f are passed as one named tuple of tensors with every constant multiplied in, ()
    if there are none. :meth:`weights` computes it. All other methods take it, or compute it if it
    is None.

    A new branch is one class with :meth:`weights`, :meth:`forward` and :meth:`lipschitz_bound`,
    that sets ``is_proven``. The rest has defaults (CONTRIBUTING.md).
    :meth:`weights_of` instead of :meth:`weights` and :meth:`bounds_of` instead of
    :meth:`lipschitz_bound` serve all layers of one :meth:`group` at once, which is faster.

    Args:
        lipschitz_target: c in (0, 1), to which the branch is scaled; inf if it is unconstrained.
    """

    correction: Tensor

    def __init__(self, lipschitz_target: float = math.inf) -> None:
        super().__init__()
        if not 0 < lipschitz_target < 1 and lipschitz_target != math.inf:
            raise ValueError(f"lipschitz_target must be in (0, 1), got {lipschitz_target}")
        self.lipschitz_target = lipschitz_target
        # Below one only if certification found the branch above its target (low precision).
        self.register_buffer("correction", torch.ones(()))

    def target_scale(self) -> Tensor:
        """c, less a margin for rounding and any correction: a factor of the normalised weights."""
        return self.correction * (self.lipschitz_target * ROUNDING_MARGIN)

    @property
    def folds_scaling(self) -> bool:
        """True if :meth:`weights_of` can fold scalings of the channels into the weights."""
        return False

    def weights(self) -> Weights:
        """The weights of f as it is now."""
        return self.weights_of([self])[0]

    @staticmethod
    def weights_of(branches: Sequence[Any], scalings: ScalingWeights | None = None) -> list[Any]:
        """The weights of several branches of one group at once.

        Args:
            branches: f_1, f_2, …
            scalings: D of each; the weights are then those of D⁻¹ f(D ·). Only for branches with
                ``folds_scaling``, whose :meth:`forward` takes a ``centre`` that is added to x.
        """
        return [branch.weights() for branch in branches]

    def group(self) -> Hashable:
        """Branches of one group share :meth:`weights_of`; None: each on its own."""
        return None

    def inner_size(self, norm: Norm, num_tokens: int, weights: Any) -> float:
        """Length of terms inside f that cancel, such as biases; see :class:`.RoundingModel`."""
        return 0.0

    def lipschitz_bound(
        self, norm: Norm, dtype: torch.dtype | None = None, weights: Any = None
    ) -> float:
        """A proven upper bound on Lip(f) in ``norm``, for the weights as cast to ``dtype``."""
        return self.bounds_of([self], norm, "global", dtype, [weights or self.weights()])[0]

    def causal_bound(self, dtype: torch.dtype | None = None, weights: Any = None) -> float:
        """A proven upper bound on the norms of the diagonal Jacobian blocks ∂f_i/∂x_i.

        A Lipschitz constant bounds them too, and a class with a ``lipschitz_bound`` of its own
        inherits no other. ValueError if a token sees later ones: then the blocks say nothing about
        the inverse.
        """
        if type(self).lipschitz_bound is not LipschitzBranch.lipschitz_bound:
            return self.lipschitz_bound("token_max", dtype, weights)
        return self.bounds_of([self], "token_max", "causal", dtype, [weights or self.weights()])[0]

    def local_bound(self, x: Tokens, measured: Measured, tight: bool = False) -> float:
        """A proven upper bound on ``measured`` at the sequences x, inf if none is known.

        ``tight`` takes longer (:meth:`.StackedBranches.local_bounds`).
        """
        alone = self.stacked([self], [self.weights()], x.shape[-2])
        alone.forward(x)
        bound = alone.local_bounds(measured, tight).item()
        # What holds everywhere holds here.
        return bound if measured == "diagonal_block" else min(bound, self.lipschitz_bound(measured))

    @staticmethod
    def bounds_of(
        branches: Sequence[Any],
        norm: Norm,
        kind: Kind,
        dtype: torch.dtype | None,
        weights: Sequence[Any],
    ) -> list[float]:
        """The bounds of several branches of one group at once.

        Args:
            branches: f_1, f_2, …
            norm: of the Lipschitz constants.
            kind: ``global`` for :meth:`lipschitz_bound`, ``causal`` for :meth:`causal_bound`.
            dtype: to which weights are cast first; None takes them as they are.
            weights: of each branch.
        """
        raise ValueError(f"no bound of a {type(branches[0]).__name__} is known")


def bounds_together(
    branches: Sequence[LipschitzBranch],
    norm: Norm,
    kind: Kind,
    dtype: torch.dtype | None,
    weights: Sequence[Any],
) -> list[float]:
    """The bound of every branch of a group: at once, unless the class has a method for one."""
    cls, methods = type(branches[0]), ("lipschitz_bound", "causal_bound")
    if all(getattr(cls, name) is getattr(LipschitzBranch, name) for name in methods):
        at_once = max(1, NUMBERS_AT_ONCE // max(1, sum(w.numel() for w in weights[0])))
        parts = [slice(i, i + at_once) for i in range(0, len(branches), at_once)]
        found = (cls.bounds_of(branches[p], norm, kind, dtype, weights[p]) for p in parts)
        return list(chain(*found))
    each = zip(branches, weights, strict=True)
    if kind == "causal":
        return [branch.causal_bound(dtype, w) for branch, w in each]
    return [branch.lipschitz_bound(norm, dtype, w) for branch, w in each]


def weights_together(weights: Sequence[Weights]) -> Weights:
    """The weights of several branches, each tensor as (branches, …)."""
    return type(weights[0])(*map(torch.stack, zip(*weights, strict=True)))


def cast(w: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The weight as it is used when the forward pass runs in ``dtype``."""
    return (w.detach() if dtype is None else w.detach().to(dtype)).contiguous()
