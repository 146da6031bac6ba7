"""Local Lipschitz constants measured from below: gains ‖Jv‖/‖v‖ of vectors found by iteration.

Nothing here is a bound from above. Every estimate carries its vector v, so that the value can be
checked with one product, and a residual that says how far v is from a stationary point.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import (
    Norm,
    divide,
    dual_vector,
    maximiser,
    stationarity,
    vector_norm,
)


@dataclass(frozen=True)
class LipschitzEstimate:
    """‖Jv‖/‖v‖ ≤ ‖J‖ in ``norm`` for each sample, with the vector that proves it.

    Attributes:
        value: gain of ``vector``, a lower bound of the operator norm up to the product's rounding.
        residual: how far ``vector`` is from stationary, relative to ``value`` (0: stationary).
        num_steps: steps taken by the sample that took most.
        converged: residual ≤ rtol. A stationary point need not be the largest; NaN never converges.
        norm: the norm of input and output.
        vector: the witness v, of norm one; also the start of a later, warm-started estimate.
    """

    value: Float[Tensor, "*batch"]
    residual: Float[Tensor, "*batch"]
    num_steps: int
    converged: Bool[Tensor, "*batch"]
    norm: Norm
    vector: Float[Tensor, "*batch tokens width"]


@dataclass(frozen=True)
class SingularValues:
    """Several extreme singular values of J (frobenius) for each sample.

    Attributes:
        values: ‖J vᵢ‖, most extreme first: leading ones from below, smallest from above.
        residuals: ‖JᵀJ vᵢ/σᵢ² − vᵢ‖ of every pair, evaluated with products, not by recurrence.
        num_steps: Lanczos steps taken by the sample that took most.
        converged: every residual ≤ rtol.
        vectors: right singular vectors vᵢ, orthonormal.
    """

    values: Float[Tensor, "*batch count"]
    residuals: Float[Tensor, "*batch count"]
    num_steps: int
    converged: Bool[Tensor, "*batch"]
    vectors: Float[Tensor, "*batch count tokens width"]


def power_iteration_estimate(
    jacobian: LinearMap,
    norm: Norm,
    *,
    start: Float[Tensor, "*batch tokens width"] | None = None,
    num_steps: int = 1,
    num_restarts: int = 0,
    rtol: float = 1e-3,
    check_every: int | None = None,
    generator: torch.Generator | None = None,
) -> LipschitzEstimate:
    """‖J‖ in ``norm`` from below by the (nonlinear) power method x ← argmax_{‖z‖ = 1} ⟨Jᵀa, z⟩.

    a is the dual vector of o = Jx: ⟨a, o⟩ = ‖o‖. ``frobenius``: power iteration on JᵀJ, residual
    ‖JᵀJv/σ² − v‖. ``token_max``: a sits at the token with the longest oᵢ, each xⱼ turns along
    (Jᵀa)ⱼ. ``entry_max``: a sits at the largest entry, x = sign(Jᵀa). In the last two the residual
    is the relative gain the next step is sure of. The gain never decreases.

    Bias: from below whatever happens. Outside ``frobenius`` it may end in a local maximum: restart.
    In ``frobenius`` it needs about σ₁/(σ₁ − σ₂) steps a digit, thousands when singular values
    cluster: prefer :func:`lanczos_estimate`. Cost: 2 num_steps + 2 products a start.

    Args:
        jacobian: J, per sample.
        norm: the norm the constant is stated in.
        start: first x of every sample, in any scale; zero or non-finite samples start at random.
        num_steps: steps to take, at most.
        num_restarts: further starts, each from the input one output token is most sensitive to; the
            best is kept, sample by sample.
        rtol: residual at which a sample is frozen and counts as converged.
        check_every: look every so many steps whether all samples are frozen, and stop (one host
            synchronisation each); None takes all steps without looking.
        generator: source of random starts, by default one of a fixed seed: no other random stream
            is disturbed. One draw serves all samples: none depends on its batch mates.

    Returns:
        The best vector seen and its gain.

    Raises:
        ValueError: the start has another shape than the map's input, or num_steps is negative.

    Source:
        frobenius: Castin, Ablin & Peyré 2024, arXiv 2312.14820, App. E.1; token_max and entry_max:
        Boyd 1974, The power method for l^p norms.
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative, got {num_steps}")
    noise = _random_sample(jacobian, generator)
    best = None
    for first in _starts(jacobian, norm, start, noise, num_restarts):
        estimate = _ascend(jacobian, norm, first, num_steps, rtol, check_every)
        best = estimate if best is None else _better(best, estimate)
    assert best is not None
    return best


def lanczos_estimate(
    jacobian: LinearMap,
    *,
    start: Float[Tensor, "*batch tokens width"] | None = None,
    max_steps: int = 100,
    rtol: float = 1e-5,
    check_every: int | None = 2,
    generator: torch.Generator | None = None,
) -> LipschitzEstimate:
    """σ_max(J) (``frobenius``) from below by Golub–Kahan bidiagonalisation.

    Bias: the gain of a vector, so from below. It is within about residual·σ/2 of *some* singular
    value, usually much closer (the error is quadratic in the residual). Cost: 2 products a step.

    Args:
        jacobian: J, per sample.
        start: first right vector, in any scale; a previous estimate's ``vector`` warms it.
        max_steps: steps at most.
        rtol: residual at which a sample is frozen.
        check_every: steps between two looks at the residuals; None takes all steps without looking.
        generator: source of the random start; a fixed seed by default.

    Returns:
        The leading Ritz vector and its gain.
    """
    found = singular_values(
        jacobian,
        start=start,
        max_steps=max_steps,
        rtol=rtol,
        check_every=check_every,
        generator=generator,
    )
    return LipschitzEstimate(
        value=found.values[..., 0],
        residual=found.residuals[..., 0],
        num_steps=found.num_steps,
        converged=found.converged,
        norm="frobenius",
        vector=found.vectors[..., 0, :, :],
    )


def smallest_singular_value(
    jacobian: LinearMap,
    *,
    start: Float[Tensor, "*batch tokens width"] | None = None,
    max_steps: int = 200,
    rtol: float = 1e-5,
    check_every: int | None = 2,
    generator: torch.Generator | None = None,
) -> SingularValues:
    """σ_min(J) from above; 1/σ_min is the inverse map's local constant (``frobenius``), from below.

    For y = x + f(x) pass :func:`invformer.numerics.linear_map.plus_identity` of ∂f/∂X. Interior and
    tiny singular values converge slowly; the residual says how far it got.

    Args:
        jacobian: J, per sample.
        start: first right vector, in any scale.
        max_steps: steps at most.
        rtol: residual at which a sample is frozen.
        check_every: steps between two looks at the residuals; None takes all steps without looking.
        generator: source of the random start; a fixed seed by default.

    Returns:
        One singular value per sample.
    """
    return singular_values(
        jacobian,
        largest=False,
        start=start,
        max_steps=max_steps,
        rtol=rtol,
        check_every=check_every,
        generator=generator,
    )


def singular_values(
    jacobian: LinearMap,
    num_singular_values: int = 1,
    *,
    largest: bool = True,
    start: Float[Tensor, "*batch tokens width"] | None = None,
    max_steps: int = 100,
    rtol: float = 1e-5,
    check_every: int | None = 2,
    generator: torch.Generator | None = None,
) -> SingularValues:
    """Extreme singular values of J by Golub–Kahan: J V_k = U_k B_k, B_k upper bidiagonal.

    Ritz pair (θ, y) of B_k: v = V_k y, residual β_k |x_k|/θ with x the left vector. Both bases are
    fully reorthogonalised, twice; where the Krylov space is exhausted it continues with a random
    direction. Before that, a singular value repeated exactly is found only once. A sample is frozen
    at the first look where all its residuals are small: no answer depends on batch mates.

    Bias: leading values from below, smallest from above. Cost: 2 products a step, and 2 for each
    value at the end; memory 2·max_steps vectors a sample (:func:`estimate_in_chunks` bounds it).

    Args:
        jacobian: J, per sample.
        num_singular_values: how many.
        largest: the leading ones, or the smallest.
        start: first right vector, in any scale; zero or non-finite samples start at random.
        max_steps: steps at most (never more than N·D).
        rtol: residual at which a pair counts as converged.
        check_every: steps between two looks at the residuals (one host synchronisation each); None
            takes all steps without looking.
        generator: source of random directions, one draw for all samples; a fixed seed by default.

    Returns:
        Values, vectors and residuals evaluated anew from the vectors.

    Raises:
        ValueError: more values asked for than there are, or than steps.

    Source:
        Golub & Kahan 1965; full reorthogonalisation as in Larsen 1998.
    """
    dimension = jacobian.shape[-2] * jacobian.shape[-1]
    max_steps = min(max_steps, dimension)
    if not 1 <= num_singular_values <= max_steps:
        raise ValueError(
            f"{num_singular_values} singular values asked for: choose 1 to {max_steps} "
            "(the steps allowed and the dimension both limit them)"
        )
    generator = generator or _fixed_generator(jacobian)
    first = _valid_start(jacobian, "frobenius", start, _random_sample(jacobian, generator))
    lanczos = _GolubKahan(jacobian, first, max_steps, generator)
    frozen = torch.zeros(jacobian.shape[:-2], dtype=torch.bool)
    coordinates = None
    while lanczos.num_steps < max_steps:
        lanczos.step()
        is_look = check_every is not None and lanczos.num_steps % check_every == 0
        last = lanczos.num_steps == max_steps
        if lanczos.num_steps < num_singular_values or not (is_look or last):
            continue
        ritz, residual = lanczos.ritz_vectors(num_singular_values, largest)
        keep = frozen[..., None, None]
        coordinates = ritz if coordinates is None else torch.where(keep, coordinates, ritz)
        # The recurrence's residual decides when to stop, with room for the rounding of the one
        # evaluated from the vectors, which is reported.
        frozen = frozen | (residual <= 0.5 * rtol).all(-1)
        if is_look and bool(frozen.all()):
            break
    assert coordinates is not None
    vectors = lanczos.right_vectors(coordinates)
    values, residuals = _gains_and_residuals(jacobian, vectors)
    return SingularValues(
        values=values,
        residuals=residuals,
        num_steps=lanczos.num_steps,
        converged=(residuals <= rtol).all(-1),
        vectors=vectors,
    )


def estimate_in_chunks(
    estimate: Callable[[Float[Tensor, "chunk tokens width"]], LipschitzEstimate],
    x: Float[Tensor, "samples tokens width"],
    chunk_size: int,
) -> LipschitzEstimate:
    """One estimate of many samples, at most ``chunk_size`` of them in memory at a time.

    E.g. ``estimate_in_chunks(lambda part: lanczos_estimate(linearise(f, part)), x, chunk_size=8)``.

    Args:
        estimate: linearises at some samples and measures.
        x: all samples.
        chunk_size: samples a call.

    Returns:
        The estimates joined in order.

    Raises:
        ValueError: chunk_size is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    parts = [estimate(part) for part in x.split(chunk_size)]
    return LipschitzEstimate(
        value=torch.cat([part.value for part in parts]),
        residual=torch.cat([part.residual for part in parts]),
        num_steps=max(part.num_steps for part in parts),
        converged=torch.cat([part.converged for part in parts]),
        norm=parts[0].norm,
        vector=torch.cat([part.vector for part in parts]),
    )


def _ascend(
    jacobian: LinearMap,
    norm: Norm,
    x: Tensor,
    num_steps: int,
    rtol: float,
    check_every: int | None,
) -> LipschitzEstimate:
    """The power method from one start; frozen samples keep their vector."""
    best = None
    for step in range(num_steps + 1):
        o = jacobian.jvp(x)
        w = jacobian.vjp(dual_vector(o, norm))
        gain = vector_norm(o, norm) / vector_norm(x, norm)
        residual = stationarity(x, w, gain, norm)
        now = LipschitzEstimate(gain, residual, step, residual <= rtol, norm, x)
        best = now if best is None else _better(best, now, keep=best.converged)
        if check_every and step % check_every == 0 and bool(best.converged.all()):
            break
        x = maximiser(w, norm, otherwise=x)
    assert best is not None
    return best


def _better(
    best: LipschitzEstimate, new: LipschitzEstimate, keep: Tensor | None = None
) -> LipschitzEstimate:
    """Sample by sample the larger value, or at equal values (to rounding) the smaller residual."""
    slack = 1 - 8 * torch.finfo(best.value.dtype).eps
    replace = (new.value > best.value) | (
        (new.value >= slack * best.value) & (new.residual < best.residual)
    )
    if keep is not None:
        replace = replace & ~keep
    return LipschitzEstimate(
        value=torch.where(replace, new.value, best.value),
        residual=torch.where(replace, new.residual, best.residual),
        num_steps=max(best.num_steps, new.num_steps),
        converged=torch.where(replace, new.converged, best.converged),
        norm=best.norm,
        vector=torch.where(replace[..., None, None], new.vector, best.vector),
    )


def _starts(
    jacobian: LinearMap, norm: Norm, start: Tensor | None, noise: Tensor, num_restarts: int
) -> Iterator[Tensor]:
    """The given or random start, then the maximisers for single, evenly spaced output tokens."""
    yield _valid_start(jacobian, norm, start, noise)
    num_tokens = jacobian.shape[-2]
    for restart in range(num_restarts):
        # The last token first: under a causal mask it sees most.
        token = num_tokens - 1 - restart * num_tokens // num_restarts
        a = torch.zeros(jacobian.shape, dtype=jacobian.dtype, device=jacobian.device)
        a[..., token, :] = noise[token]
        yield maximiser(jacobian.vjp(a), norm, otherwise=noise.expand(jacobian.shape))


def _valid_start(jacobian: LinearMap, norm: Norm, start: Tensor | None, noise: Tensor) -> Tensor:
    """A vector of norm one for every sample: the start where it is usable, the noise elsewhere."""
    noise = (noise / vector_norm(noise, norm)).expand(jacobian.shape)
    if start is None:
        return noise
    if start.shape != jacobian.shape:
        raise ValueError(
            f"start has shape {tuple(start.shape)}, the map acts on {tuple(jacobian.shape)}"
        )
    start = start.to(noise)
    length = vector_norm(start, norm)[..., None, None]
    return torch.where((length > 0) & length.isfinite(), divide(start, length), noise)


def _random_sample(jacobian: LinearMap, generator: torch.Generator | None) -> Tensor:
    """One Gaussian sample (N, D), the same for every member of a batch and in every precision."""
    return torch.randn(
        jacobian.shape[-2:],
        dtype=torch.float32,
        device=jacobian.device,
        generator=generator or _fixed_generator(jacobian),
    ).to(jacobian.dtype)


def _fixed_generator(jacobian: LinearMap) -> torch.Generator:
    """A private source of random numbers: an estimate must not disturb a training run's."""
    return torch.Generator(jacobian.device).manual_seed(0)


class _GolubKahan:
    """The bidiagonalisation of J for a batch of samples, grown one step at a time.

    α_k u_k = J v_k − β_{k−1} u_{k−1},   β_k v_{k+1} = Jᵀ u_k − α_k v_k.
    """

    def __init__(
        self, jacobian: LinearMap, start: Tensor, max_steps: int, generator: torch.Generator
    ) -> None:
        self.jacobian = jacobian
        self.generator = generator
        self.num_steps = 0
        size = (*jacobian.shape[:-2], max_steps, start.shape[-2] * start.shape[-1])
        self.v = start.new_zeros(size)
        self.u = start.new_zeros(size)
        self.alpha: list[Tensor] = []
        self.beta: list[Tensor] = []
        self.next_v = start.flatten(-2)
        self.scale = start.new_zeros(jacobian.shape[:-2])

    def step(self) -> None:
        """One product with J and one with Jᵀ."""
        k = self.num_steps
        v = self.v[..., k, :] = self.next_v
        u, alpha = self._orthonormal(self._apply(self.jacobian.jvp, v), self.u[..., :k, :])
        self.u[..., k, :] = u
        self.num_steps = k + 1
        w = self._apply(self.jacobian.vjp, u)
        self.next_v, beta = self._orthonormal(w, self.v[..., : k + 1, :])
        self.alpha.append(alpha)
        self.beta.append(beta)

    def ritz_vectors(self, count: int, largest: bool) -> tuple[Tensor, Tensor]:
        """Coordinates in V of the right Ritz vectors, padded to max_steps, and their residuals.

        B is small: its decomposition is left to the CPU, in float64.
        """
        alpha, beta = (torch.stack(c, -1).double().cpu() for c in (self.alpha, self.beta))
        b = torch.diag_embed(alpha) + torch.diag_embed(beta[..., :-1], offset=1)
        left, theta, right = torch.linalg.svd(b.nan_to_num(0.0, 0.0, 0.0))
        order = torch.arange(count)
        pick = order if largest else self.num_steps - 1 - order
        uncaught = beta[..., -1:] * left[..., -1, pick].abs()
        finite = b.isfinite().flatten(-2).all(-1, keepdim=True)
        residual = torch.where(finite, divide(uncaught, theta[..., pick]), torch.nan)
        padding = self.v.shape[-2] - self.num_steps
        return torch.nn.functional.pad(right[..., pick, :], (0, padding)), residual

    def right_vectors(self, coordinates: Tensor) -> Tensor:
        """V y of norm one, shaped as tokens."""
        vectors = coordinates.to(self.v) @ self.v
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        return vectors.unflatten(-1, self.jacobian.shape[-2:])

    def _apply(self, product: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        return product(vector.unflatten(-1, self.jacobian.shape[-2:])).flatten(-2)

    def _orthonormal(self, w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        """The part of w outside the basis: its direction and its length.

        A length at rounding level means that the Krylov space is exhausted: it counts as zero, and
        a random direction takes over. The second projection serves both cases.
        """
        self.scale = torch.maximum(self.scale, torch.linalg.vector_norm(w, dim=-1))
        w = _project_out(w, basis)
        rounding = 4 * w.shape[-1] ** 0.5 * torch.finfo(w.dtype).eps * self.scale
        exhausted = torch.linalg.vector_norm(w, dim=-1) <= rounding
        noise = _random_sample(self.jacobian, self.generator).flatten()
        w = _project_out(torch.where(exhausted.unsqueeze(-1), noise, w), basis)
        length = torch.linalg.vector_norm(w, dim=-1)
        return w / length.unsqueeze(-1), torch.where(exhausted, torch.zeros_like(length), length)


def _project_out(w: Tensor, basis: Tensor) -> Tensor:
    """(I − basisᵀ basis) w, for a basis with orthonormal rows."""
    return w - (basis.mT @ (basis @ w.unsqueeze(-1))).squeeze(-1)


def _gains_and_residuals(jacobian: LinearMap, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """σᵢ = ‖J vᵢ‖ and ‖JᵀJ vᵢ/σᵢ² − vᵢ‖, two products a vector."""
    gains, residuals = [], []
    for v in vectors.unbind(-3):
        o = jacobian.jvp(v)
        gain = vector_norm(o, "frobenius")
        w = jacobian.vjp(dual_vector(o, "frobenius"))
        gains.append(gain / vector_norm(v, "frobenius"))
        residuals.append(stationarity(v, w, gain, "frobenius"))
    return torch.stack(gains, -1), torch.stack(residuals, -1)
