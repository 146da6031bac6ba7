"""Nothing that is not finite ever reaches a weight or the optimiser's memory."""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.errors import NonFiniteError
from invformer.numerics.private import foreach_norm


class UpdateGuard:
    """Looks at loss and gradients after the backward pass and before the update.

    The verdict stays on the device, for which nobody waits: from the first bad update on
    :attr:`lost` is 1, and an optimiser that reads it leaves weights and memory as they are.
    :meth:`culprit` waits, and says what was wrong.
    """

    def __init__(self) -> None:
        self.lost: Float[Tensor, ""] | None = None
        self._evidence: Tensor  # step, loss, norm of every gradient
        self._names: list[str]  # of the parameters

    def inspect(
        self, step: int, loss: Tensor, gradients: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """Look at the update of a step; returns the Euclidean norm of all gradients together."""
        each = foreach_norm(list(gradients.values()))
        norms = torch.stack(each)
        norm = torch.linalg.vector_norm(norms)
        bad = (~(norm + loss).isfinite()).to(norm)
        number = torch.full_like(loss, step, dtype=torch.float64)
        evidence = torch.cat([torch.stack([number, loss.double()]), norms.double()])
        if self.lost is None:
            self.lost, self._evidence = torch.zeros_like(bad), evidence
            self._names = list(gradients)
        self._evidence = torch.where(self.lost.bool(), self._evidence, evidence)
        self.lost = torch.maximum(self.lost, bad)
        return norm

    def refuse(self, windows_of: Callable[[int], object] | None = None) -> None:
        """Raise NonFiniteError if an update so far was not finite; waits for the device.

        ``windows_of`` names the text that a step has read.
        """
        if (culprit := self.culprit()) is not None:
            step, what = culprit
            where = f" in windows {windows_of(step)}" if windows_of else ""
            raise NonFiniteError.at(step, f"{what}{where}; the update was not made")

    def culprit(self) -> tuple[int, str] | None:
        """Step of the first bad update and what was wrong with it; waits for the device."""
        if self.lost is None or not self.lost.item():
            return None
        step, loss, *norms = self._evidence.tolist()
        pairs = zip(self._names, norms, strict=True)
        parameters = [name for name, norm in pairs if not math.isfinite(norm)]
        what = [] if math.isfinite(loss) else [f"the loss ({loss})"]
        what += [f"the gradient of {name}" for name in parameters[:1]]
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        wrong = " and ".join(what) or "the norm of all gradients together"
        return int(step), f"{wrong}{more} is not finite"
