"""What a residual branch must offer to be certified, linearised and inverted."""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm

# Constants normalised in the forward precision stay below their target after float64 certification.
ROUNDING_MARGIN = 1 - 2e-5

Weights = TypeVar("Weights")
Derived = TypeVar("Derived")


class LipschitzBranch(nn.Module):
    """A map f on sequences with a certified Lipschitz constant and a known Jacobian.

    Args:
        lipschitz_target: c, what the branch is scaled to; inf for an unconstrained branch.
    """

    correction: Tensor
    _frozen: Any = None
    _shared: Any = None
    # Frozen weights, and what was last made of them.
    _derived: tuple[Any, Any] | None = None

    def __init__(self, lipschitz_target: float = math.inf) -> None:
        super().__init__()
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
    def forward_weights(branches: Sequence[Any]) -> list[Any]:
        """What forward passes multiply by, for branches of one kind at once, with gradients."""
        raise NotImplementedError

    def in_metric(
        self,
        x: Float[Tensor, "*batch tokens width"],
        scale: Float[Tensor, "width"],
        shift: Float[Tensor, "width"],
    ) -> Float[Tensor, "*batch tokens width"]:
        """D⁻¹ f(D x + b), D of ``scale`` and b the ``shift``: for training, folded into weights."""
        return self(torch.addcmul(shift, x, scale)) / scale

    def linearise(self, x: Float[Tensor, "*batch tokens width"]) -> LinearMap:
        """The Jacobian of f at X as analytic products."""
        raise NotImplementedError

    def local_bound(
        self, x: Float[Tensor, "*batch tokens width"], norm: Norm, tight: bool = False
    ) -> Float[Tensor, "*batch"]:
        """A proven upper bound on the Jacobian's norm at each X, between estimate and certificate.

        ``tight`` spends an eigenproblem or a spectral norm per token.
        """
        raise NotImplementedError

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
    """Compute every branch's effective weights once and hold them, for evaluation and inversion.

    The function cannot change inside the block, which a fixed-point iteration relies on; it is also
    faster, because no normalisation is repeated per call. Nested use keeps the outer weights.
    """
    branches = [m for m in model.modules() if isinstance(m, LipschitzBranch) and m._frozen is None]
    try:
        for branch in branches:
            with torch.no_grad():
                branch._frozen = branch.effective_weights()
        yield
    finally:
        for branch in branches:
            branch._frozen = branch._derived = None


@contextmanager
def shared_weights(branches: Iterable[LipschitzBranch]) -> Iterator[None]:
    """Compute the weights of one forward pass for all branches of a kind at once.

    A layer's constants are a few dozen numbers each: layer by layer they take longer than the
    products they scale, at small sizes.
    """
    groups: dict[Hashable, list[LipschitzBranch]] = {}
    for branch in branches:
        kind = branch.kind()
        if not branch.is_frozen and kind is not None:
            groups.setdefault(kind, []).append(branch)
    try:
        for group in groups.values():
            for branch, weights in zip(group, group[0].forward_weights(group), strict=True):
                branch._shared = weights
        yield
    finally:
        for group in groups.values():
            for branch in group:
                branch._shared = None


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
    b: Float[Tensor, "outputs"],
) -> Float[Tensor, "*batch tokens outputs"]:
    """x W + b in one operation."""
    return torch.addmm(b, x.flatten(0, -2), w).unflatten(0, x.shape[:-1])


def cast(w: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The weight as it is used when the forward pass runs in ``dtype``."""
    return w.detach() if dtype is None else w.detach().to(dtype)
