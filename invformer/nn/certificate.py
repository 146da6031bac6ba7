"""What is proven of an invertible stack: constants, one norm, no guesses."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from invformer.numerics.norms import Norm
from invformer.numerics.residual_equation import Kind
from invformer.numerics.rounding import upwards


class NoCertificateError(ValueError):
    """There is no proof for something in the model, so there is no certificate either."""


@dataclass(frozen=True, repr=False)
class Certificate:
    """Proven upper bounds for one stack.

    Attributes:
        norm: the norm on sequences of every bound here; with a scaling D of the channels it is the
            weighted norm ‖D x‖.
        kind: ``global`` (Lipschitz constants) or ``causal`` (norms of the diagonal Jacobian blocks,
            enough to invert a causal stack; not Lipschitz constants).
        target: the largest ``lipschitz_target`` of the branches.
        targets: the target of every residual branch, by name.
        per_branch: proven bound for every residual branch, by name.
        conditions: max D / min D of every branch with a scaling, by name, rounded up: its constant
            in the norm without D may be this many times larger.
        scales: the largest scale of every ActivationNorm, by name, rounded up.
        total: bound on the whole stack in the norm without D, Π (1 + c_l condition_l) Π scales;
            None if ``kind`` is causal.
        dtype: the precision the weights were cast to before they were certified.
        seq_len: longest sequence for which the bounds hold.
    """

    norm: Norm
    kind: Kind
    target: float
    targets: dict[str, float]
    per_branch: dict[str, float]
    conditions: dict[str, float]
    scales: dict[str, float]
    total: float | None
    dtype: str
    seq_len: int

    def __repr__(self) -> str:
        worst = max(self.per_branch, key=lambda name: self.per_branch[name])
        constants = "Lipschitz bounds" if self.kind == "global" else "diagonal-block bounds"
        norm = f"weighted {self.norm}" if self.conditions else self.norm
        return (
            f"Certificate({len(self.per_branch)} {constants} ≤ {upwards(self.bound_max, 6)} "
            f"in {norm} (worst {worst}), target {self.target}: "
            f"{'holds' if self.holds else 'VIOLATED'})"
        )

    @property
    def bound_max(self) -> float:
        """The largest bound of any branch."""
        return max(self.per_branch.values())

    @property
    def holds(self) -> bool:
        """True if every branch is proven to be at or below its own target."""
        return all(bound <= self.targets[name] for name, bound in self.per_branch.items())

    def require(self, norm: Norm, kind: Kind) -> None:
        """Raise ValueError unless the bounds are in this norm and of this kind."""
        if (self.norm, self.kind) != (norm, kind):
            raise ValueError(
                f"the certificate is {self.kind} in {self.norm}, the stack's targets are {kind} "
                f"in {norm}: certify the stack without a kind or norm"
            )

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return asdict(self)


def require_type(name: str, module: nn.Module | None, known: tuple[type, ...]) -> None:
    """Raise NoCertificateError for a type that nothing is proven about."""
    if (cls := type(module)) not in known:
        raise NoCertificateError(f"{name}: no proof is known for {cls.__name__}")
