"""What a residual branch must offer to be certified, linearised and inverted."""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.nn.activation_norm import ChannelAffine
from invformer.nn.channel_metric import ChannelMetric, Metrics, metrics_of
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm

# Constants normalised in the forward precision stay below their target after float64 certification.
ROUNDING_MARGIN = 1 - 2e-5

# Multiplications in float64 that a tight local bound of one branch may take.
MOST_TIGHT = 2e11
# Those of a certified spectral norm of a D × D matrix, in D³.
PER_SPECTRAL_NORM = 10

Weights = TypeVar("Weights")
Derived = TypeVar("Derived")


class Folded(NamedTuple):
    """Weights with D and D⁻¹ folded in, and the m = D⁻¹ b that is added to what they multiply."""

    weights: Any
    centre: Tensor


class LipschitzBranch(nn.Module):
    """A map f on sequences with a certified Lipschitz constant and a known Jacobian.

    Args:
        lipschitz_target: c in (0, 1), what the branch is scaled to; inf for an unconstrained one.

    Raises:
        ValueError: c is something else.
    """

    # Whether one number is its local bound in token_max and in frobenius.
    has_one_local_bound = False
    # Whether it takes every token by itself.
    is_token_wise = False
    correction: Tensor
    _frozen: Any = None
    _shared: Any = None
    # Frozen weights, and what was last made of them.
    _derived: tuple[Any, Any] | None = None

    def __init__(self, lipschitz_target: float = math.inf) -> None:
        super().__init__()
        if not 0 < lipschitz_target < 1 and lipschitz_target != math.inf:
            raise ValueError(f"lipschitz_target must be in (0, 1), got {lipschitz_target}")
        self.lipschitz_target = lipschitz_target
        # Below one only if certification found the branch above its target (low precision).
        self.register_buffer("correction", torch.ones(()))

    def __getstate__(self) -> dict[str, Any]:
        """A copy computes its weights itself: nobody would release those that are held here."""
        held = ("_frozen", "_shared", "_derived")
        return {key: value for key, value in self.__dict__.items() if key not in held}

    def target_scale(self) -> Tensor:
        """c, less the margin for rounding and any correction: what normalised weights multiply."""
        return self.correction * (self.lipschitz_target * ROUNDING_MARGIN)

    def effective_weights(self) -> Any:
        """The plain matrices of the present function, constants folded in."""
        return self.forward_weights([self])[0]

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`weights` are held rather than computed."""
        return self._frozen is not None

    def weights(self) -> Any:
        """The frozen weights inside :func:`frozen_weights`, the present ones otherwise."""
        return self._frozen if self._frozen is not None else self.effective_weights()

    def derived(self, weights: Weights, make: Callable[[Weights], Derived]) -> Derived:
        """``make(weights)``, once for frozen weights: a branch has one such thing to make."""
        if weights is not self._frozen:
            return make(weights)
        if self._derived is None or self._derived[0] is not weights:
            self._derived = weights, make(weights)
        made: Derived = self._derived[1]
        return made

    def kind(self) -> Hashable:
        """Branches that agree in this can share :meth:`forward_weights`; None: each on its own."""
        return None

    @staticmethod
    def forward_weights(branches: Sequence[Any], metrics: Metrics | None = None) -> list[Any]:
        """What forward passes multiply by, for branches of one kind at once, with gradients.

        Args:
            branches: of one kind.
            metrics: theirs, to be folded in; only for branches that fold metrics.
        """
        raise NotImplementedError

    @property
    def folds_metrics(self) -> bool:
        """Whether :meth:`forward_weights` can fold metrics of the channels in."""
        return False

    def in_metric(
        self, x: Float[Tensor, "*batch tokens width"], metric: ChannelMetric
    ) -> Float[Tensor, "*batch tokens width"]:
        """D⁻¹ f(D x + b), folded into the weights where the branch folds metrics.

        For training: the same function as layer by layer, with gradients for less.
        """
        if self.folds_metrics:
            return self.applied(x, *self.folded(metric))
        return self(metric(x)) * (-metric.log_scale).exp()

    def applied(
        self,
        x: Float[Tensor, "*batch tokens width"],
        weights: Any,
        centre: Float[Tensor, "width"] | None = None,
    ) -> Float[Tensor, "*batch tokens width"]:
        """What f makes of x + m with these weights; of a branch that folds metrics."""
        raise NotImplementedError

    def folded(self, metric: ChannelMetric) -> Folded:
        """The shared weights, if they are folded, or those of this branch alone."""
        if isinstance(self._shared, Folded):
            return self._shared
        return fold([self], [metric])[0]

    def linearise(self, x: Float[Tensor, "*batch tokens width"]) -> LinearMap:
        """The Jacobian of f at X as analytic products."""
        raise NotImplementedError

    def local_bound(
        self, x: Float[Tensor, "*batch tokens width"], norm: Norm, tight: bool = False
    ) -> Float[Tensor, "*batch"]:
        """A proven upper bound on the Jacobian's norm at each X, between estimate and certificate.

        ``tight`` spends an eigenproblem or a spectral norm per token, as long as these are
        affordable (:func:`is_affordable`).
        """
        raise NotImplementedError

    def inner_size(self, norm: Norm, num_tokens: int) -> float:
        """Length of what f adds up inside, whatever x is: more rounds than x and f(x) tell."""
        return 0.0

    def bound_by_construction(self, norm: Norm) -> Tensor | None:
        """The bound on Lip(f) that normalised weights imply, at no cost and on the device.

        None where the construction says nothing about ``norm``. It rests on the float32 normaliser
        being above the spectral norm; :meth:`lipschitz_bound` proves a number without that.
        """
        return None

    def own_token_by_construction(self) -> Tensor | None:
        """The bound on ‖∂f_i/∂x_i‖₂ that normalised weights imply: at most that in token_max."""
        return self.bound_by_construction("token_max")

    def lipschitz_bound(self, norm: Norm, dtype: torch.dtype | None = None) -> float:
        """A proven upper bound on Lip(f) in ``norm``, for the weights as cast to ``dtype``."""
        raise NotImplementedError

    def causal_bound(self, dtype: torch.dtype | None = None) -> float:
        """A proven upper bound on ‖∂f_i/∂x_i‖₂ for all i: what one token does to its own row."""
        return self.lipschitz_bound("token_max", dtype)


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Compute every layer's effective weights once and hold them, for evaluation and inversion.

    The function cannot change inside the block, which a fixed-point iteration relies on; it is also
    faster, because no normalisation is repeated per call. Nested use keeps the outer weights.
    """
    layers = [
        m
        for m in model.modules()
        if isinstance(m, LipschitzBranch | ChannelAffine) and m._frozen is None
    ]
    try:
        for layer in layers:
            with torch.no_grad():
                layer._frozen = layer.effective_weights()
        yield
    finally:
        for layer in layers:
            layer._frozen = None
            if isinstance(layer, LipschitzBranch):
                layer._derived = None


@contextmanager
def shared_weights(
    branches: Iterable[LipschitzBranch],
    metrics: Mapping[LipschitzBranch, ChannelMetric] | None = None,
) -> Iterator[None]:
    """Compute the weights of one forward pass for all branches of a kind at once.

    A layer's constants are a few dozen numbers each: layer by layer they take longer than the
    products they scale, at small sizes.

    Args:
        branches: all, frozen ones and those without a kind included: these see to themselves.
        metrics: of those branches that run :meth:`LipschitzBranch.in_metric`.
    """
    groups: dict[Hashable, list[LipschitzBranch]] = {}
    for branch in branches:
        kind = branch.kind()
        if not branch.is_frozen and kind is not None:
            groups.setdefault(kind, []).append(branch)
    try:
        for group in groups.values():
            if metrics and group[0] in metrics and group[0].folds_metrics:
                shared: list[Any] = fold(group, [metrics[branch] for branch in group])
            else:
                shared = group[0].forward_weights(group)
            for branch, of_branch in zip(group, shared, strict=True):
                branch._shared = of_branch
        yield
    finally:
        for group in groups.values():
            for branch in group:
                branch._shared = None


def fold(branches: Sequence[LipschitzBranch], metrics: Sequence[ChannelMetric]) -> list[Folded]:
    """The weights of branches of one kind in their metrics."""
    of_branches = metrics_of(metrics)
    weights = branches[0].forward_weights(branches, of_branches)
    return [Folded(*pair) for pair in zip(weights, of_branches.centre, strict=True)]


def exact_copy(branch: LipschitzBranch) -> LipschitzBranch:
    """The same function in float64: today's effective weights, cast, not normalised anew.

    Residuals evaluated with it are those of the function that was certified and inverted.
    """
    with torch.no_grad():
        weights = branch.weights()
    copied = copy.copy(branch)  # everything else a forward pass uses is cast where it is used
    copied._frozen = type(weights)(*(w.detach().double() for w in weights))
    return copied


def affine(
    x: Float[Tensor, "*batch tokens inputs"],
    w: Float[Tensor, "inputs outputs"],
    b: Float[Tensor, "outputs"] | None = None,
    centre: Float[Tensor, "inputs"] | None = None,
) -> Float[Tensor, "*batch tokens outputs"]:
    """(x + m) W + b in one pass over the tokens."""
    if centre is None:
        if b is None:
            return x @ w
        return torch.addmm(b, x.flatten(0, -2), w).unflatten(0, x.shape[:-1])
    if torch._C._are_functorch_transforms_active():
        y = (x + centre) @ w
        return y if b is None else y + b
    return CentredAffine.apply(x.flatten(0, -2), w, b, centre).unflatten(0, x.shape[:-1])


class CentredAffine(torch.autograd.Function):
    """(x + m) W + b: what autograd makes of x W + (m W + b) passes over W three times more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, centre: Tensor) -> Tensor:
        """x W + (m W + b)."""
        ctx.save_for_backward(x, w, centre)
        shift = w.mT @ centre if b is None else torch.addmv(b, w.mT, centre)
        return torch.addmm(shift, x, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """g Wᵀ, (x + m)ᵀ g, Σ g and W Σ g."""
        (g,) = gradients
        x, w, centre = ctx.saved_tensors
        total = g.sum(0)
        return (
            g @ w.mT,
            torch.addr(x.mT @ g, centre, total),
            total if ctx.needs_input_grad[2] else None,
            w @ total,
        )


def is_affordable(num_tokens: int, multiplications_per_token: float) -> bool:
    """Whether a tight local bound in float64 takes some seconds at most, not minutes."""
    return num_tokens * multiplications_per_token <= MOST_TIGHT


def cast(w: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The weight as it is used when the forward pass runs in ``dtype``."""
    return w.detach() if dtype is None else w.detach().to(dtype)
