"""Where the next iterate of x = y − f(x) is proposed: Picard's step or Anderson mixing.

A proposal is only a suggestion: the solver keeps it if the residual drops and takes the plain
Picard step otherwise, so nothing here can spoil the convergence that a contraction guarantees.
"""

from typing import Protocol

import torch
from torch import Tensor


class Proposer(Protocol):
    """Proposes iterates from the current x and residual r = y − x − f(x), all (B, N, D).

    One without a memory only proposes.
    """

    def propose(self, x: Tensor, r: Tensor, active: Tensor) -> tuple[Tensor, Tensor | int]:
        """The next iterate of every sample, and how many evaluations of f it took, per sample."""
        ...

    def learn(self, dx: Tensor, dr: Tensor, keep: Tensor) -> None:
        """Take in one step: r changed by dr when x changed by dx; forget where not ``keep``."""

    def of(self, rows: Tensor) -> None:
        """Go on with these samples only."""

    def forget(self) -> None:
        """Start afresh."""


class Picard(Proposer):
    """x ← x + r = y − f(x)."""

    def propose(self, x: Tensor, r: Tensor, active: Tensor) -> tuple[Tensor, int]:
        """The plain step; it needs no evaluation beyond the residual."""
        return x + r, 0


class Anderson(Proposer):
    """Anderson mixing, type II: x ← x + r − (ΔX + ΔR) γ with γ = argmin ‖r − ΔR γ‖₂² + λ‖γ‖².

    ΔX and ΔR hold the last m changes of x and of r. Least squares per sample, by the Gram matrix of
    the normalised columns in float64. Walker & Ni 2011, SIAM J. Numer. Anal. 49, §2; the restart
    after a rejected step is ours. Cost: m inner products a step, no evaluation of f.

    Args:
        memory: m.
        regularisation: λ, relative to columns of length one.
        token_wise: one γ per token instead of one per sample, so that no token is disturbed by
            later ones.
    """

    def __init__(
        self, memory: int = 5, regularisation: float = 1e-10, token_wise: bool = False
    ) -> None:
        self.memory = memory
        self.regularisation = regularisation
        self.token_wise = token_wise
        self.dx: list[Tensor] = []
        self.dr: list[Tensor] = []

    def propose(self, x: Tensor, r: Tensor, active: Tensor) -> tuple[Tensor, int]:
        """The mixed step; the Picard step while there is no history."""
        if not self.dr:
            return x + r, 0
        dx, dr = (torch.stack([self._flat(d) for d in h], -2) for h in (self.dx, self.dr))
        length = torch.linalg.vector_norm(dr, dim=-1, keepdim=True)
        length = torch.where(length > 0, length, 1)
        rows = (dr / length).double()
        gram = rows @ rows.mT
        gram = gram + self.regularisation * torch.eye(gram.shape[-1]).to(gram)
        # solve_ex does not raise: one broken sample may not stop its batch mates.
        gamma, _ = torch.linalg.solve_ex(gram, rows @ self._flat(r).double().unsqueeze(-1))
        gamma = gamma.to(dx.dtype) / length
        return x + r - (gamma.mT @ dx.add_(dr)).view_as(x), 0

    def _flat(self, x: Tensor) -> Tensor:
        """(B, N, D) as one vector per sample, or per token."""
        return x if self.token_wise else x.flatten(1)

    def learn(self, dx: Tensor, dr: Tensor, keep: Tensor) -> None:
        """Remember the step, and drop the history of samples that must start afresh."""
        forget = ~keep[:, None, None]
        self.dx = [d.masked_fill(forget, 0) for d in [*self.dx, dx][-self.memory :]]
        self.dr = [d.masked_fill(forget, 0) for d in [*self.dr, dr][-self.memory :]]

    def of(self, rows: Tensor) -> None:
        """The history of these samples only."""
        self.dx, self.dr = [d[rows] for d in self.dx], [d[rows] for d in self.dr]

    def forget(self) -> None:
        """No history."""
        self.dx, self.dr = [], []
