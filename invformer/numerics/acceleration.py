"""Where the next iterate of x = y − f(x) is proposed: Anderson mixing and Newton–Krylov.

A proposal is only a suggestion: the solver keeps it if the residual drops and takes the plain
Picard step otherwise, so nothing here can spoil the convergence that a contraction guarantees.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from invformer.numerics.linear_map import LinearMap


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


class NewtonKrylov(Proposer):
    """Newton's step (I + J_f(x)) δ = r, solved by GMRES until ‖r − (I + J)δ‖₂ ≤ η ‖r‖₂.

    Inexact Newton (Dembo, Eisenstat & Steihaug 1982) with GMRES per sample (Saad & Schultz 1986):
    all samples share one Jacobian product a time. Cost of a step: one linearisation and as many
    products as the slowest active sample needs, each about one evaluation of f.

    Args:
        linearise: x ↦ Jacobian of f at x.
        forcing: η.
        krylov_dimension: most products a step.
    """

    def __init__(
        self,
        linearise: Callable[[Tensor], LinearMap],
        forcing: float = 0.03,
        krylov_dimension: int = 20,
    ) -> None:
        self.linearise = linearise
        self.forcing = forcing
        self.krylov_dimension = krylov_dimension

    def propose(self, x: Tensor, r: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """x + δ; x + r if nobody needs more."""
        if not bool(active.any()):
            return x + r, torch.zeros_like(active, dtype=torch.int64)
        jacobian = self.linearise(x)
        delta, products = gmres(
            lambda v: v + jacobian.jvp(v), r, active, self.forcing, self.krylov_dimension
        )
        return x + delta, products + active.long()


def gmres(
    a: Callable[[Tensor], Tensor], b: Tensor, active: Tensor, rtol: float, dimension: int
) -> tuple[Tensor, Tensor]:
    """A δ = b per sample by GMRES from δ = 0, without restart (Saad & Schultz 1986).

    Args:
        a: δ ↦ A δ on (B, N, D), one linear map per sample.
        b: right-hand sides (B, N, D).
        active: samples that count; the others get whatever comes along.
        rtol: stop when ‖b − A δ‖₂ ≤ rtol ‖b‖₂ for every active sample.
        dimension: most products with A.

    Returns:
        δ, and the number of products each sample took part in before it was done.
    """
    batch, size = b.shape[0], b[0].numel()
    dimension = min(dimension, size)
    length = torch.linalg.vector_norm(b.flatten(1), dim=1)
    basis = torch.zeros(batch, dimension + 1, size, dtype=b.dtype, device=b.device)
    basis[:, 0] = b.flatten(1) / torch.where(length > 0, length, 1)[:, None]
    hessenberg = torch.zeros(batch, dimension + 1, dimension, dtype=b.dtype, device=b.device)
    target = torch.zeros(batch, dimension + 1, 1, dtype=b.dtype, device=b.device)
    target[:, 0, 0] = 1
    products = torch.zeros_like(active, dtype=torch.int64)
    solution = torch.zeros(batch, size, dtype=b.dtype, device=b.device)
    open_samples = active & (length > 0)
    for k in range(dimension):
        products += open_samples
        w = a(basis[:, k].view_as(b)).flatten(1)
        for _ in range(2):  # the second pass of Gram–Schmidt keeps the basis orthogonal
            overlap = basis[:, : k + 1] @ w.unsqueeze(-1)
            w = w - (basis[:, : k + 1].mT @ overlap).squeeze(-1)
            hessenberg[:, : k + 1, k] += overlap.squeeze(-1)
        norm = torch.linalg.vector_norm(w, dim=1)
        # A tiny remainder means that the Krylov space is exhausted and δ is exact in it.
        exhausted = norm <= 4 * torch.finfo(b.dtype).eps * hessenberg[:, :, k].abs().amax(1)
        norm = norm.masked_fill(exhausted, 0)
        hessenberg[:, k + 1, k] = norm
        basis[:, k + 1] = w / torch.where(norm > 0, norm, 1)[:, None]
        # Past exhaustion the columns are zero; one on the diagonal keeps the factor invertible.
        hessenberg[:, k, k] += (hessenberg[:, :, k] == 0).all(1)
        h, e = hessenberg[:, : k + 2, : k + 1], target[:, : k + 2]
        q, upper = torch.linalg.qr(h)
        coefficients = torch.linalg.solve_triangular(upper, q.mT @ e, upper=True)
        remainder = torch.linalg.vector_norm(e - h @ coefficients, dim=(1, 2))
        update = (basis[:, : k + 1].mT @ coefficients).squeeze(-1) * length[:, None]
        solution = torch.where(open_samples[:, None], update, solution)
        open_samples = open_samples & ~(remainder <= rtol) & ~exhausted
        if not open_samples.any():
            break
    return solution.view_as(b), products
