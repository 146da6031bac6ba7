"""Local Lipschitz constants from below: gains ‖Jx‖ of vectors found by power iteration.

‖J‖ = max ⟨a, Jx⟩ over ‖x‖ ≤ 1 and ‖a‖* ≤ 1. The power method of Boyd maximises over one of the two
at a time: x ← argmax ⟨Jᵀa, x⟩, then a ← argmax ⟨a, Jx⟩. In ``frobenius`` that is ordinary power
iteration on JᵀJ; in ``token_max`` a is a unit vector at one output token and every x_j a unit
vector; in ``entry_max`` a is ± one entry and x a vector of signs. A gain is a lower bound of ‖J‖
wherever the iteration stops; outside ``frobenius`` it may stop in a local maximum.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.kernels.attention import only
from invformer.numerics.linear_map import LinearMap, SequenceMap, linearise
from invformer.numerics.norms import Norm, dual_vector, stationarity, vector_norm

# Output tokens that one step of a PowerIteration advances, where J mixes tokens (token_max).
TOKENS_AT_ONCE = 8


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
    seed: int = 0,
) -> LipschitzEstimate:
    """‖J‖ from below, the best of a few random starts.

    In ``frobenius`` a step maximises over the span of x, JᵀJx and the step before (LOBPCG, Knyazev
    2001), which takes about the root of the steps of plain power iteration. Cost: num_starts ·
    (2 num_steps + 1) products at most; a start ends when every sample has converged.

    Args:
        jacobian: J, per sample.
        norm: of input and output.
        num_steps: steps of each start, at most.
        num_starts: left vectors to start from, outside ``frobenius`` each at one of as many evenly
            spaced output tokens, the last token first.
        rtol: residual that counts as converged.
        seed: of the left vectors; one draw serves all samples.

    Source: Boyd 1974, The power method for l^p norms.
    """
    like = {"dtype": jacobian.dtype, "device": jacobian.device}
    generator = torch.Generator(jacobian.device).manual_seed(seed)
    num_tokens = jacobian.shape[-2]
    best: LipschitzEstimate | None = None
    for start in range(num_starts):
        a = torch.randn(jacobian.shape[-2:], generator=generator, **like)
        if norm != "frobenius":
            token = num_tokens - 1 - start * num_tokens // num_starts
            a[:token], a[token + 1 :] = 0, 0
        found = ascend(jacobian, a.expand(jacobian.shape), norm, num_steps, rtol)
        best = found if best is None else better(best, found)
    assert best is not None
    return best


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
            return LipschitzEstimate(gain, residual, residual <= rtol, norm, x)
        further = unit(w, norm)
        further_o = jacobian.jvp(further)
        if norm == "frobenius":
            (further, further_o), (before, before_o) = best_in_span(
                torch.stack([x, further, before]), torch.stack([o, further_o, before_o])
            )
        # A sample that has converged stays as it is: none depends on its batch mates.
        moves = ~(residual <= rtol)[..., None, None]
        x, o = torch.where(moves, further, x), torch.where(moves, further_o, o)
    raise ValueError(f"num_steps must be at least 1, got {num_steps}")


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
    vector a_i of its own: an iteration that only follows the largest token stays in a local
    maximum, 10 to 40 % too low. A step advances ``TOKENS_AT_ONCE`` tokens: the one that was largest
    when last visited, and others in turn. Where J acts token by token, it advances all of them.

    The gains are lower bounds at every step; they lag by what J moved meanwhile.

    Args:
        shape: of J, (branches, sequences, N, D). Products take a further dimension after the
            sequences, of several vectors.
        norm: of input and output.
        per_token: whether J = diag(J_1, …, J_N).
        seed: of the first left vectors.
    """

    def __init__(
        self,
        shape: torch.Size,
        norm: Norm,
        per_token: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.norm: Norm = norm
        self.per_token, self.num_tokens = per_token, shape[-2]
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        rows: Norm = "frobenius" if norm == "frobenius" and not per_token else "token_max"
        self.left = unit(noise, rows).to(device, dtype)  # a_i as rows
        self.lengths = torch.zeros(shape[:-1], dtype=dtype, device=device)  # ‖(Jx)_i‖, last seen
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        mixes = norm == "token_max" and not per_token
        self.num_vectors = min(TOKENS_AT_ONCE, self.num_tokens) if mixes else 1
        self.others = torch.arange(self.num_vectors - 1, device=device).expand(*shape[:2], -1)
        self.here = torch.eye(self.num_tokens, dtype=dtype, device=device)[..., None]

    def step(
        self, jacobian: LinearMap
    ) -> tuple[Float[Tensor, "branches sequences K"], Float[Tensor, "branches sequences K N D"]]:
        """The gains ‖Jx‖ of some vectors x of norm one, and these vectors."""
        if self.norm == "token_max" and not self.per_token:
            return self._tokens_apart(jacobian)
        rows: Norm = "token_max" if self.per_token else self.norm
        x, o = power_step(jacobian, self.left.unsqueeze(2), rows)
        if self.per_token:
            lengths = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
            turned = o / lengths.clamp_min(least_length(o))
        else:
            lengths, turned = vector_norm(o, rows)[..., None, None], dual_vector(o, rows)
        moved = lengths > least_length(o)
        self.left.copy_(torch.where(moved, turned, self.left.unsqueeze(2)).squeeze(2))
        if self.norm == "frobenius" and self.per_token:  # in which the largest stands alone
            x = torch.where(lengths == lengths.amax(-2, keepdim=True), x, 0)
        return lengths.amax((-2, -1)), x

    def _tokens_apart(self, jacobian: LinearMap) -> tuple[Tensor, Tensor]:
        width = self.left.shape[-1]
        if self.num_vectors == self.num_tokens:
            a = self.here * self.left.unsqueeze(2)
            self.lengths.zero_()
        else:
            others = (self.others + self.turn) % self.num_tokens
            self.turn += others.shape[-1]
            chosen = torch.cat([self.lengths.argmax(-1, keepdim=True), others], -1)
            rows = chosen[..., None, None].expand(-1, -1, -1, 1, width)
            a = self.left.new_zeros(*chosen.shape, self.num_tokens, width)
            a.scatter_(3, rows, self.left.gather(2, rows.squeeze(3)).unsqueeze(3))
            self.lengths.scatter_(2, chosen, 0.0)
        x, o = power_step(jacobian, a, "token_max")
        # Any vector may turn out to be the best for a token; those chosen forget their old one.
        lengths = torch.linalg.vector_norm(o, dim=-1)
        longest, which = lengths.max(2)
        best = o.gather(2, which[:, :, None, :, None].expand(-1, -1, 1, -1, width)).squeeze(2)
        improved = longest > self.lengths.clamp_min(least_length(o))
        best = best / longest.clamp_min(least_length(o)).unsqueeze(-1)
        self.left.copy_(torch.where(improved.unsqueeze(-1), best, self.left))
        torch.maximum(self.lengths, longest, out=self.lengths)
        return lengths.amax(-1), x

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers; loading is copying into them."""
        return {"left": self.left, "lengths": self.lengths, "turn": self.turn}
