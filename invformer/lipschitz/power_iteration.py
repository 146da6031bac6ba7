"""Local Lipschitz constants from below: gains ‖Jx‖ of vectors found by power iteration.

‖J‖ = max ⟨a, Jx⟩ over ‖x‖ ≤ 1 and ‖a‖* ≤ 1. The power method of Boyd maximises over one of the two
at a time: x ← argmax ⟨Jᵀa, x⟩, then a ← argmax ⟨a, Jx⟩. In ``frobenius`` that is ordinary power
iteration on JᵀJ; in ``token_max`` a is a unit vector at one output token and every x_j a unit
vector; in ``entry_max`` a is ± one entry and x a vector of signs. A gain is a lower bound of ‖J‖
wherever the iteration stops; outside ``frobenius`` it may stop in a local maximum.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.kernels.attention import only
from invformer.numerics.linear_map import LinearMap, SequenceMap, linearise
from invformer.numerics.norms import Norm, dual_vector, stationarity, vector_norm

# Output tokens that one step of a PowerIteration advances besides the largest (token_max).
SCOUTS = 7


@dataclass(frozen=True)
class LipschitzEstimate:
    """‖Jx‖/‖x‖ ≤ ‖J‖ in ``norm`` for each sample, with the vector that proves it.

    Attributes:
        value: gain of ``vector``, a lower bound of the operator norm up to the product's rounding.
        residual: how far ``vector`` is from stationary, relative to ``value``: ‖JᵀJx/σ² − x‖ in
            ``frobenius``, otherwise what another step adds to the gain at least.
        converged: residual ≤ rtol. A stationary point need not be the largest; NaN never converges.
        norm: the norm of input and output.
        vector: the x of norm one.
    """

    value: Float[Tensor, "*batch"]
    residual: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    norm: Norm
    vector: Float[Tensor, "*batch tokens width"]


def local_lipschitz(
    f: SequenceMap, x: Float[Tensor, "*batch tokens width"], norm: Norm = "token_max", **options
) -> LipschitzEstimate:
    """‖∂f/∂X‖ at X from below, by power iteration on products that autograd makes.

    Args:
        f: a map that keeps the shape and does not mix samples, as for :func:`.linearise`.
        x: where.
        norm: of input and output.
        options: of :func:`operator_norm`.
    """
    with only("math"):  # fused attention has no second derivative
        jacobian = linearise(f, x)
    return operator_norm(jacobian, norm, **options)


def operator_norm(
    jacobian: LinearMap,
    norm: Norm = "token_max",
    *,
    num_steps: int = 100,
    num_starts: int = 1,
    rtol: float = 1e-4,
    generator: torch.Generator | None = None,
) -> LipschitzEstimate:
    """‖J‖ from below, the best of a few starts.

    In ``frobenius`` a step maximises over the span of x, JᵀJx and the step before (LOBPCG, Knyazev
    2001), which takes about the root of the steps of plain power iteration. In ``token_max`` the
    first starts are the largest rows Σ_j ‖J_ij‖ as one random direction sees them, one per token.

    Cost: num_starts · (2 num_steps + 1) products; it stops early when every sample has converged.

    Args:
        jacobian: J, per sample.
        norm: of input and output.
        num_steps: steps of each start, at most.
        num_starts: starts from left vectors at evenly spaced output tokens, the last token first.
        rtol: residual that counts as converged.
        generator: source of the left vectors; one of a fixed seed by default. One draw serves all
            samples, so that none depends on its batch mates.

    Source: Boyd 1974, The power method for l^p norms.
    """
    best: LipschitzEstimate | None = None
    for a in left_vectors(jacobian, norm, num_starts, generator):
        found = ascend(jacobian, a, norm, num_steps, rtol)
        best = found if best is None else better(best, found)
    assert best is not None
    return best


def left_vectors(
    jacobian: LinearMap, norm: Norm, count: int, generator: torch.Generator | None
) -> Iterator[Float[Tensor, "*batch tokens width"]]:
    """Random left vectors: at all tokens in ``frobenius``, otherwise at one token each."""
    generator = generator or torch.Generator(jacobian.device).manual_seed(0)
    num_tokens = jacobian.shape[-2]
    for start in range(count):
        noise = torch.randn(
            jacobian.shape[-2:], generator=generator, dtype=jacobian.dtype, device=jacobian.device
        )
        if norm != "frobenius":
            token = num_tokens - 1 - start * num_tokens // count
            noise[:token], noise[token + 1 :] = 0, 0
        yield noise.expand(jacobian.shape)


def ascend(
    jacobian: LinearMap, a: Tensor, norm: Norm, num_steps: int, rtol: float
) -> LipschitzEstimate:
    """The power method from one left vector."""
    x, o = power_step(jacobian, a, norm)
    before, before_o = torch.zeros_like(x), torch.zeros_like(o)
    for step in range(num_steps):
        gain = vector_norm(o, norm)
        w = jacobian.vjp(dual_vector(o, norm))
        residual = stationarity(x, w, gain, norm)
        if step == num_steps - 1 or bool((residual <= rtol).all()):
            break
        further = unit(w, norm)
        further_o = jacobian.jvp(further)
        if norm == "frobenius":
            (further, further_o), (before, before_o) = best_in_span(
                torch.stack([x, further, before]), torch.stack([o, further_o, before_o])
            )
        # A sample that has converged stays as it is: none depends on its batch mates.
        moves = ~(residual <= rtol)[..., None, None]
        x, o = torch.where(moves, further, x), torch.where(moves, further_o, o)
    return LipschitzEstimate(gain, residual, residual <= rtol, norm, x)


def best_in_span(
    x: Float[Tensor, "3 *batch tokens width"], o: Float[Tensor, "3 *batch tokens width"]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The longest Jx of ‖x‖ = 1 in the span of three vectors, and the step that led there.

    Args:
        x: three vectors, the present one first.
        o: their images.
    """
    columns, images = (t.flatten(-2).movedim(0, -1) for t in (x, o))
    basis, r = torch.linalg.qr(columns)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    # A column that depends on those before it is left out: its image is mostly rounding.
    independent = diagonal.abs() > 1e-6 * torch.linalg.vector_norm(columns, dim=-2)
    r = r + torch.diag_embed(torch.where(independent, 0, 1 - diagonal))
    images = torch.linalg.solve_triangular(r, images, upper=True, left=False)
    images = images * independent.unsqueeze(-2)
    finite = torch.where(images.isfinite(), images, 0)  # what is not stays so in the basis
    y = torch.linalg.svd(finite, full_matrices=False).Vh[..., 0, :, None]
    step = y * torch.tensor([0.0, 1.0, 1.0], dtype=y.dtype, device=y.device)[:, None]

    def combined(coordinates: Tensor) -> tuple[Tensor, Tensor]:
        pair = (m @ coordinates for m in (basis, images))
        first, second = (m.squeeze(-1).unflatten(-1, x.shape[-2:]) for m in pair)
        return first, second

    return combined(y), combined(step)


def better(best: LipschitzEstimate, new: LipschitzEstimate) -> LipschitzEstimate:
    """Sample by sample the larger of two."""
    wins = new.value > best.value
    return LipschitzEstimate(
        torch.where(wins, new.value, best.value),
        torch.where(wins, new.residual, best.residual),
        torch.where(wins, new.converged, best.converged),
        best.norm,
        torch.where(wins[..., None, None], new.vector, best.vector),
    )


def power_step(jacobian: LinearMap, a: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """x = argmax ⟨Jᵀa, x⟩ over ‖x‖ ≤ 1, and Jx."""
    x = unit(jacobian.vjp(a), norm)
    return x, jacobian.jvp(x)


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


class PowerIteration:
    """‖J‖ from below, step by step, while J moves slowly under it.

    A step takes one product with Jᵀ and one with J. It starts from the left vectors of the step
    before and keeps them in place, on the device. In ``token_max`` every output token i has a left
    vector a_i of its own. A step advances the token that was largest when last visited, and
    ``scouts`` others in turn: an iteration that only follows the largest token stays in a local
    maximum, 10 to 40 % too low. Where J acts token by token, every step advances all tokens.

    The value is the gain of x, a lower bound at every step; it lags by what J moved meanwhile.

    Args:
        shape: of J, (branches, sequences, N, D). Products take a further dimension after the
            sequences, of several vectors.
        norm: of input and output.
        per_token: whether J = diag(J_1, …, J_N).
        scouts: see above.
        seed: of the first left vectors.
    """

    def __init__(
        self,
        shape: torch.Size,
        norm: Norm,
        per_token: bool,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scouts: int = SCOUTS,
        seed: int = 0,
    ) -> None:
        self.norm, self.per_token = norm, per_token
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        row_wise: Norm = "frobenius" if norm == "frobenius" and not per_token else "token_max"
        self.left = unit(noise, row_wise).to(device, dtype)  # a_i as rows
        self.lengths = torch.zeros(shape[:-1], dtype=dtype, device=device)  # ‖(Jx)_i‖, last seen
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        self.scouts = torch.arange(min(scouts, shape[-2]), device=device).expand(*shape[:2], -1)

    @property
    def num_vectors(self) -> int:
        """How many vectors a step hands to the products."""
        in_turn = self.norm == "token_max" and not self.per_token
        return 1 + self.scouts.shape[-1] if in_turn else 1

    def step(
        self, jacobian: LinearMap
    ) -> tuple[Float[Tensor, "branches sequences K"], Float[Tensor, "branches sequences K N D"]]:
        """The gains ‖Jx‖ of some vectors x of norm one, and these vectors."""
        if self.per_token:
            return self._all_tokens(jacobian)
        if self.norm == "token_max":
            return self._some_tokens(jacobian)
        x, o = power_step(jacobian, self.left.unsqueeze(2), self.norm)
        value = vector_norm(o, self.norm)
        moved = (value > 0)[..., None, None]
        left = torch.where(moved, dual_vector(o, self.norm), self.left.unsqueeze(2))
        self.left.copy_(left.squeeze(2))
        return value, x

    def _all_tokens(self, jacobian: LinearMap) -> tuple[Tensor, Tensor]:
        x, o = power_step(jacobian, self.left.unsqueeze(2), "token_max")
        lengths = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
        says_something = lengths > least_length(o)
        turned = torch.where(says_something, unit(o, "token_max"), self.left.unsqueeze(2))
        self.left.copy_(turned.squeeze(2))
        value, largest = lengths.max(-2, keepdim=True)
        return value[..., 0, 0], torch.zeros_like(lengths).scatter_(-2, largest, 1) * x

    def _some_tokens(self, jacobian: LinearMap) -> tuple[Tensor, Tensor]:
        num_tokens, width = self.left.shape[-2:]
        scouts = (self.scouts + self.turn) % num_tokens
        self.turn += scouts.shape[-1]
        chosen = torch.cat([self.lengths.argmax(-1, keepdim=True), scouts], -1)
        rows = chosen[..., None, None].expand(-1, -1, -1, 1, width)
        a = self.left.new_zeros(*chosen.shape, num_tokens, width)
        a.scatter_(3, rows, self.left.gather(2, rows.squeeze(3)).unsqueeze(3))
        x, o = power_step(jacobian, a, "token_max")
        # Any vector may turn out to be the best for a token; those chosen forget their old one.
        lengths = torch.linalg.vector_norm(o, dim=-1)
        longest, which = lengths.max(2)
        best = o.gather(2, which[:, :, None, :, None].expand(-1, -1, 1, -1, width)).squeeze(2)
        self.lengths.scatter_(2, chosen, 0.0)
        improved = (longest > self.lengths) & (longest > least_length(o))
        best = best / longest.clamp_min(least_length(o)).unsqueeze(-1)
        self.left.copy_(torch.where(improved.unsqueeze(-1), best, self.left))
        torch.maximum(self.lengths, longest, out=self.lengths)
        return lengths.amax(-1), x

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers; loading is copying into them."""
        return {"left": self.left, "lengths": self.lengths, "turn": self.turn}
