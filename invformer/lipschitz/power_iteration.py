"""Local Lipschitz constants from below: gains ‖Jx‖ of vectors found by power iteration.

‖J‖ = max ⟨a, Jx⟩ over ‖x‖ ≤ 1 and ‖a‖* ≤ 1. The power method of Boyd maximises over one of the two
at a time: x ← argmax ⟨Jᵀa, x⟩, then a ← argmax ⟨a, Jx⟩. In ``frobenius`` that is ordinary power
iteration on JᵀJ; in ``token_max`` a is a unit vector at one output token and every x_j a unit
vector; in ``entry_max`` a is ± one entry and x a vector of signs. A gain is a lower bound of ‖J‖
wherever the iteration stops; outside ``frobenius`` it may stop in a local maximum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.branches.jacobian import Products
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import Norm, divide, dual_vector, stationarity, vector_norm

# Output tokens that one step of a PowerIteration advances.
TOKENS_AT_ONCE = 16


@dataclass(frozen=True)
class LipschitzEstimate:
    """‖Jx‖/‖x‖ ≤ ‖J‖ for each sample, with the vector that proves it.

    Attributes:
        value: gain of ``vector``, a lower bound of the operator norm up to the product's rounding.
        residual: how far ``vector`` is from stationary, relative to ``value``: ‖JᵀJx/σ² − x‖ in
            ``frobenius``, otherwise what another step adds to the gain at least.
        converged: residual ≤ rtol. A stationary point need not be the largest; NaN never converges.
        vector: the x of norm one.
    """

    value: Float[Tensor, "*batch"]
    residual: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    vector: Float[Tensor, "*batch tokens width"]


def operator_norm(
    jacobian: LinearMap,
    norm: Norm = "token_max",
    *,
    num_steps: int = 100,
    rtol: float = 1e-4,
    seed: int = 0,
) -> LipschitzEstimate:
    """‖J‖ from below, by the power method from one random left vector.

    In ``frobenius`` a step maximises over the span of x, JᵀJx and the step before (LOBPCG, Knyazev
    2001), which takes about the root of the steps of plain power iteration. Cost: 2 products a
    step, in ``frobenius`` 3; it ends when every sample has converged to ``rtol``, or after
    ``num_steps``. One left vector serves all samples; outside ``frobenius`` another ``seed`` may
    find a larger gain.

    Source: Boyd 1974, The power method for l^p norms.
    """
    y = jacobian.value
    generator = torch.Generator(y.device).manual_seed(seed)
    a = torch.randn(y.shape[-2:], generator=generator, dtype=y.dtype, device=y.device)
    x = unit(jacobian.vjp(a.expand(y.shape)), norm)
    o = jacobian.jvp(x)
    before = torch.zeros_like(x)
    for step in range(num_steps):
        gain = vector_norm(o, norm)
        w = jacobian.vjp(dual_vector(o, norm))
        residual = stationarity(x, w, gain, norm)
        if step == num_steps - 1 or bool((residual <= rtol).all()):
            return LipschitzEstimate(gain, residual, residual <= rtol, x)
        further = unit(w, norm)
        if norm == "frobenius":
            further, further_o, before = best_in_span(jacobian, x, o, further, before)
        else:
            further_o = jacobian.jvp(further)
        # A sample that has converged stays as it is: none depends on its batch mates.
        moves = ~(residual <= rtol)[..., None, None]
        x, o = torch.where(moves, further, x), torch.where(moves, further_o, o)
    raise ValueError(f"num_steps must be at least 1, got {num_steps}")


def best_in_span(
    jacobian: LinearMap, x: Tensor, o: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest Jx of ‖x‖ = 1 in the span of x and others: x, Jx, and the step that led there.

    Every vector of an orthonormal basis has a product of its own. Images of vectors that nearly
    depend on one another, subtracted, would be rounding that grows from step to step. o is Jx.
    """
    columns = torch.stack([x, *others], -1).flatten(-3, -2)
    basis, r = torch.linalg.qr(columns)
    news = (q.unflatten(-1, x.shape[-2:]) for q in basis.unbind(-1)[1:])
    images = [divide(o, r[..., :1, :1]), *map(jacobian.jvp, news)]  # the first of the basis is ±x
    images = torch.stack(images, -1).flatten(-3, -2)
    finite = torch.where(images.isfinite(), images, 0)  # what is not stays so in the basis
    y = torch.linalg.svd(finite, full_matrices=False).Vh[..., 0, :, None]
    found = basis @ y, images @ y, basis[..., 1:] @ y[..., 1:, :]
    shapes = x.shape, o.shape, x.shape
    best, image, step = (t.view(shape) for t, shape in zip(found, shapes, strict=True))
    return best, image, step


def unit(w: Tensor, norm: Norm) -> Tensor:
    """The x with ‖x‖ ≤ 1 that maximises ⟨w, x⟩; shorter where the squares of w underflow."""
    match norm:
        case "token_max":
            length = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        case "frobenius":
            length = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
        case "entry_max":
            return w.sign()
    return w / length.clamp_min(least_length(w))


def least_length(w: Tensor) -> float:
    """Lengths from here on are right to 2⁻²⁰, whatever entries of the vector underflow."""
    return 1024.0 * (w.shape[-2] * w.shape[-1] * torch.finfo(w.dtype).tiny) ** 0.5


class Step(NamedTuple):
    """The gains ‖Jx‖ of K vectors of norm one, (branches, sequences, K).

    ``residual`` computes how far each vector is from stationary.
    """

    gains: Tensor
    residual: Callable[[], Tensor]


class PowerIteration:
    """‖J‖ from below, step by step, while J moves slowly under it.

    A step takes one product with Jᵀ and one with J. It starts from the left vectors of the step
    before and keeps them in place, on the device. The gains are lower bounds at every step, up to
    the rounding of both products; they lag by what J moved meanwhile.

    In token_max and entry_max ‖J‖ is the largest ‖J_i·‖ of an output token's row, and every token
    has a left vector of its own: an iteration that only follows the largest token stays in a local
    maximum, 10 to 40 % too low. A step advances ``at_once`` tokens: three quarters are those that
    were largest when last visited or were never visited, the others take turns. (Compiled code
    chooses them otherwise, :func:`.chosen_rows`.) In frobenius there is one left vector for each
    sequence.

    J has the ``shape`` (branches, sequences, N, D); the first left vectors are drawn by ``seed``.
    """

    def __init__(
        self,
        shape: torch.Size,
        norm: Norm,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        self.norm: Norm = norm
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.left = unit(left, "frobenius" if norm == "frobenius" else "token_max").to(
            device, dtype
        )
        self.lengths = torch.full(shape[:-1], torch.inf, dtype=dtype, device=device)  # ‖J_i·x‖
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        num_vectors = min(at_once, shape[-2])
        self.leaders = max(1, 3 * num_vectors // 4)
        self.slots = torch.arange(num_vectors, device=device).expand(*shape[:2], -1)

    def step(self, products: Callable[[Tensor], Products]) -> Step:
        """One step of every branch and sequence; ``products`` are those of chosen tokens' rows.

        x = Jᵀa/‖Jᵀa‖, the gain is ‖Jx‖, and Jx/‖Jx‖ the next a, up to the norm (:meth:`_improve`).
        """
        if self.norm == "frobenius":
            new_left, step = self._improve(self.left, products(self.slots))
            self.left.copy_(new_left)
            return step
        all_at_once = self.slots.shape[-1] == self.left.shape[-2]
        chosen = self.slots if all_at_once else self._tokens_in_turn()  # (branches, sequences, K)
        index = chosen.unsqueeze(-1).expand(-1, -1, -1, self.left.shape[-1])
        left = self.left if all_at_once else self.left.gather(2, index)  # (…, …, K, D)
        jvp, vjp = products(chosen)
        of_rows = Products(lambda x: jvp(x).unsqueeze(-2), lambda a: vjp(a.squeeze(-2)))
        a = left.flatten(1, 2).unsqueeze(-2)  # one row each: (branches, sequences · K, 1, D)
        new_left, step = self._improve(a, of_rows)
        self.left.scatter_(2, index, new_left.view(left.shape))
        self.lengths.scatter_(2, chosen, step.gains)
        return step

    def _improve(self, a: Tensor, products: Products) -> tuple[Tensor, Step]:
        """x maximises ⟨Jᵀa, x⟩ among unit vectors, then the new a maximises ⟨a, Jx⟩."""
        jvp, vjp = products
        w = vjp(a)
        x = unit(w, self.norm)
        o = jvp(x)
        lengths = vector_norm(o, self.norm)[..., None, None]
        new_a = torch.where(lengths > least_length(w), dual_vector(o, self.norm), a)
        gains = lengths.view(*self.left.shape[:2], -1)

        def residual() -> Tensor:
            return stationarity(x, vjp(new_a), gains.flatten(1), self.norm).view(gains.shape)

        return new_a, Step(gains, residual)

    def _tokens_in_turn(self) -> Tensor:
        """The tokens that were largest when last visited, and those whose turn it is."""
        largest = self.lengths.sort(dim=-1, descending=True, stable=True).indices
        others = (self.slots[..., self.leaders :] + self.turn) % self.left.shape[-2]
        self.turn += self.slots.shape[-1] - self.leaders
        return torch.cat([largest[..., : self.leaders], others], -1)

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers; loading is copying into them."""
        return {"left": self.left, "lengths": self.lengths, "turn": self.turn}
