"""Dot-product attention: its Jacobian, and its Lipschitz constants on bounded inputs.

Castin, Ablin & Peyré 2024, *How Smooth Is Attention?*, arXiv 2312.14820, in the paper's notation
(rows of X are tokens x_i ∈ R^D, A = KᵀQ/√k, V acts as x ↦ V x):

    f(X)_i = V Σ_j P_ij x_j,    P_ij ∝ m_j exp(x_jᵀ(A x_i + a)) over the visible j

with masses m (1 for a plain sequence) and a = Kᵀb_Q from a query bias (a key bias changes nothing).
f is not Lipschitz on all inputs; every bound here is in ``frobenius`` and for tokens of length ≤ R,
masked or not. Numbers are rounded outward: an upper bound that leaves float64 is inf, a lower one
stays finite.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.numerics.l2_attention import softmax_jacobian
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.rounding import round_up
from invformer.numerics.spectral_norm import spectral_norm_bound

Form = Literal["paper", "triangle"]

LARGEST_EXPONENT = 746.0  # e^{−x} is 0 in float64 from here on, e^x is inf from 710 on


def dot_product_weights(
    x: Float[Tensor, "*batch tokens width"],
    a: Float[Tensor, "width width"],
    *,
    visible: Bool[Tensor, "tokens tokens"] | None = None,
    mass: Float[Tensor, "tokens"] | None = None,
    shift: Float[Tensor, "width"] | None = None,
) -> Float[Tensor, "*batch tokens tokens"]:
    """P_ij ∝ m_j exp(x_jᵀ(A x_i + a)) over the visible j: plain, masked, weighted, or with biases.

    Args:
        x: tokens.
        a: A = KᵀQ/√k.
        visible: which j row i sees; all by default.
        mass: m_j of a weighted measure Σ m_j δ_{x_j}; equal by default.
        shift: a = Kᵀb_Q/√k; zero by default.

    Returns:
        Rows that sum to one.

    Source:
        Castin et al. 2024, Definitions 2.1, 2.5, C.4 and App. E.3.
    """
    logits = _pull(x, a, shift) @ x.mT
    if mass is not None:
        logits = logits + mass.log()
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    return logits.softmax(-1)


def dot_product_jacobian(
    x: Float[Tensor, "*batch tokens width"],
    p: Float[Tensor, "*batch tokens tokens"],
    a: Float[Tensor, "width width"],
    v: Float[Tensor, "width width"],
    shift: Float[Tensor, "width"] | None = None,
) -> LinearMap:
    """Df(ε)_i = V [Σ_j P_ij ε_j + Cov_i A ε_i + Σ_j P_ij (x_j − m_i)(A x_i + a)ᵀ ε_j].

    m_i and Cov_i are mean and covariance of the tokens under P_i. Masks and masses enter through P
    alone. O(N²) memory.

    Args:
        x: tokens.
        p: their :func:`dot_product_weights`.
        a: A.
        v: V.
        shift: a = Kᵀb_Q/√k; zero by default.

    Returns:
        The products with the Jacobian and its transpose.

    Source:
        Castin et al. 2024, Lemmas C.2, C.6, D.1 and E.2.
    """
    pull = _pull(x, a, shift)

    def jvp(dx: Tensor) -> Tensor:
        dp = softmax_jacobian(p, pull @ dx.mT + dx @ a.mT @ x.mT)
        return (p @ dx + dp @ x) @ v.mT

    def vjp(g: Tensor) -> Tensor:
        dp = softmax_jacobian(p, g @ v @ x.mT)
        return p.mT @ g @ v + dp.mT @ pull + dp @ x @ a

    return LinearMap(jvp, vjp, x.shape, x.dtype, x.device)


def ball_bound(
    norm_a: float, norm_v: float, radius: float, num_tokens: int, form: Form = "triangle"
) -> float:
    """Lip(f) on n tokens of length ≤ R, masked or not, from above.

    ``paper``: √3 ‖V‖ (‖A‖² R⁴ (4n + 1) + n)^½. ``triangle``: ‖V‖ (√n (1 + ‖A‖R²) + ‖A‖R²), smaller
    and as easy: Σ_j P_ij ‖x_j − m_i‖‖ε_j‖ ≤ R (Σ_j P_ij ‖ε_j‖²)^½ by Cauchy–Schwarz.

    Args:
        norm_a: ‖A‖₂ or a bound on it.
        norm_v: ‖V‖₂ or a bound on it.
        radius: R.
        num_tokens: n.
        form: which of the two.

    Returns:
        The bound.

    Source:
        Castin et al. 2024, Theorems 3.3 and 4.3; ``triangle`` is ours.
    """
    bend = norm_a * radius * radius  # a power would raise where a product is inf
    if form == "paper":
        bound = math.sqrt(3 * (bend * bend * (4 * num_tokens + 1) + num_tokens))
    else:
        bound = math.sqrt(num_tokens) * (1 + bend) + bend
    return round_up(norm_v * bound, 12)


def bias_ball_bound(
    norm_a: float, norm_v: float, norm_shift: float, radius: float, num_tokens: int
) -> float:
    """Lip(f) with biases, a = Kᵀb_Q/√k: √3 ‖V‖ (‖A‖²R⁴ + 4nR²(‖A‖R + ‖a‖)² + n)^½ from above.

    A key bias has no influence, a value bias only moves the output.

    Args:
        norm_a: ‖A‖₂ or a bound on it.
        norm_v: ‖V‖₂ or a bound on it.
        norm_shift: ‖a‖₂.
        radius: R.
        num_tokens: n.

    Returns:
        The bound.

    Source:
        Castin et al. 2024, Theorem E.3, constant derived anew.
    """
    pull = radius * (norm_a * radius + norm_shift)
    bend = norm_a * radius * radius
    inside = bend * bend + 4 * num_tokens * (pull * pull) + num_tokens
    return round_up(norm_v * math.sqrt(3 * inside), 14)


def diameter_bound(
    x: Float[Tensor, "*batch tokens width"],
    a: Float[Tensor, "width width"],
    v: Float[Tensor, "width width"],
) -> Float[Tensor, "*batch"]:
    """‖Df(X)‖ ≤ ‖V‖ (√n (1 + M r/√2) + ‖A‖ r²/4), M = max_i ‖A x_i‖, r = max_ij ‖x_i − x_j‖.

    A local bound that sees only lengths: ‖Cov_i‖ ≤ r²/4 and tr Cov_i ≤ r²/2 for any weights, so it
    covers every mask.

    Args:
        x: tokens.
        a: A.
        v: V.

    Returns:
        One bound per sequence, float64.

    Source:
        After Castin et al. 2024, Theorem C.3 (same hypotheses; constants ours).
    """
    x, a = x.double(), a.double()
    n = x.shape[-2]
    square = x.square().sum(-1)
    rounding = 8 * x.shape[-1] * torch.finfo(x.dtype).eps * square.amax(-1)
    r2 = (square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * x @ x.mT).amax((-2, -1)) + rounding
    pull = torch.linalg.vector_norm(x @ a.mT, dim=-1).amax(-1)
    bend = spectral_norm_bound(a) * r2 / 4
    bound = spectral_norm_bound(v) * (math.sqrt(n) * (1 + pull * (r2 / 2).sqrt()) + bend)
    # Where squares leave float64 their difference is no number.
    return (bound * (1 + 1e-13 * x.shape[-1])).nan_to_num(nan=math.inf, posinf=math.inf)


def two_cluster_rate(a: Float[Tensor, "width width"]) -> float:
    """γ = max(−γ_min, γ_max/8) over the real eigenvalues of A: how sharply two clusters can split.

    Args:
        a: A.

    Returns:
        γ; 0 if A has no real eigenvalue (or only zero).

    Source:
        Castin et al. 2024, Proposition 3.4.
    """
    return _worst_direction(a)[0]


def two_cluster_tokens(
    a: Float[Tensor, "width width"], radius: float, num_tokens: int
) -> Float[Tensor, "tokens width"]:
    """The attack: one token at R u, the others at R u/2; or one at −R u, the others at R u.

    u is the unit eigenvector of γ_max if γ_max > −8 γ_min, of γ_min otherwise. Here the constant of
    dot-product attention grows like √n; that of tied L2 attention does not.

    Args:
        a: A, with a real eigenvalue.
        radius: R.
        num_tokens: n.

    Returns:
        The tokens, the lone one first.

    Raises:
        ValueError: A has no real eigenvalue.

    Source:
        Castin et al. 2024, Lemma C.7.
    """
    _, first, others, u = _worst_direction(a)
    if u is None:
        raise ValueError("A has no real eigenvalue: there is no two-cluster configuration")
    position = torch.full((num_tokens, 1), others * radius, dtype=u.dtype, device=u.device)
    position[0] = first * radius
    return position * u


def two_cluster_lower_bound(
    rate: float, radius: float, num_tokens: int, form: Literal["paper", "sharper"] = "sharper"
) -> float:
    """Lip(f) on B_R^n for V = I, from below: √(n−1)/(1 + (n−1)e^{−2γR²}), by two clusters.

    ``sharper`` multiplies by 1 + 2γR² P₂₂, P₂₂ = (n−1)e^{−2γR²}/(1 + (n−1)e^{−2γR²}): perturbing a
    token moves the weights as well. At least ½√(n−1) for n ≤ 1 + e^{2γR²}.

    Args:
        rate: γ of :func:`two_cluster_rate`, ≥ 0.
        radius: R.
        num_tokens: n.
        form: as printed, or with the factor.

    Returns:
        The lower bound.

    Source:
        Castin et al. 2024, Proposition 3.4; the factor is ours.
    """
    exponent = 2 * rate * radius * radius
    others = (num_tokens - 1) * math.exp(-exponent)
    bound = math.sqrt(num_tokens - 1) / (1 + others)
    if form == "sharper" and others > 0:
        bound *= 1 + exponent * others / (1 + others)
    return _down(bound, exponent)


def mean_field_bound(
    norm_a: float,
    norm_v: float,
    radius: float,
    *,
    masked: bool = False,
    form: Form = "triangle",
) -> float:
    """Lip(F) of attention on probability measures on B_R, from above, whatever the length.

    ``paper``: c ‖V‖ (1 + 3‖A‖R²) e^{2‖A‖R²}. ``triangle``, smaller: ‖V‖ (‖A‖R² + c (1 + 2‖A‖R²)
    e^{2‖A‖R²}). c = 1 for the distance W₂; c = 2 if ``masked``, for d₂² = ∫ W₂(μ^τ, ν^τ)² dτ: with
    c = 1 the masked statement is false (A = 0 is the Cesàro mean: its norm tends to 2, by Hardy).

    Args:
        norm_a: ‖A‖₂ or a bound on it.
        norm_v: ‖V‖₂ or a bound on it.
        radius: R.
        masked: causal attention.
        form: which of the two.

    Returns:
        The bound.

    Source:
        Castin et al. 2024, Theorems 3.5 and 4.4; ``triangle`` and the factor c are ours.
    """
    bend = norm_a * radius * radius
    growth = _exp(2 * bend)
    if growth == math.inf:
        return math.inf
    growth *= 2 if masked else 1
    bound = growth * (1 + 3 * bend) if form == "paper" else bend + growth * (1 + 2 * bend)
    return round_up(norm_v * bound, 12 + math.ceil(8 * bend))


def mean_field_growth(rate: float, radius: float) -> float:
    """(γ/2) R² e^{γR²}: reached by Lip(F) on measures on B_R (V = I), up to a factor → 1 as R → ∞.

    By :func:`two_dirac_measure`. An asymptotic size, not a bound at finite R.

    Args:
        rate: γ of :func:`two_cluster_rate`.
        radius: R.

    Returns:
        The size, rounded down as what is reached from below: finite where it leaves float64.

    Source:
        Castin et al. 2024, Propositions 3.6 and C.8.
    """
    exponent = rate * radius * radius
    return _down(exponent / 2 * _exp(exponent), exponent)


def two_dirac_measure(
    a: Float[Tensor, "width width"], radius: float
) -> tuple[Float[Tensor, "two width"], Float[Tensor, "two"]]:
    """Two atoms at the two-cluster positions, masses 1/n and 1 − 1/n with n − 1 = e^{2γR²}.

    Args:
        a: A, with a real eigenvalue.
        radius: R.

    Returns:
        Positions and masses. The first mass is 0 where it is no float64 any more, 2γR² > 745.

    Source:
        Castin et al. 2024, proof of Proposition C.8.
    """
    x = two_cluster_tokens(a, radius, 2)
    lone = math.exp(-2 * two_cluster_rate(a) * radius * radius)  # in units of the other mass
    return x, x.new_tensor([lone / (1 + lone), 1 / (1 + lone)])


def large_radius_bound(norm_v: float, num_tokens: int) -> float:
    """√n ‖V‖: limit from above of ‖Df(R X)‖ as R → ∞, for almost every X.

    Args:
        norm_v: ‖V‖₂ or a bound on it.
        num_tokens: n.

    Returns:
        The bound.

    Source:
        Castin et al. 2024, Theorems 3.7 and 4.5.
    """
    return round_up(math.sqrt(num_tokens) * norm_v, 3)


def large_radius_limit(
    x: Float[Tensor, "*batch tokens width"],
    a: Float[Tensor, "width width"],
    v: Float[Tensor, "width width"],
    visible: Bool[Tensor, "tokens tokens"] | None = None,
) -> Float[Tensor, "*batch"]:
    """lim_{R→∞} ‖Df(R X)‖ = ‖V‖ (max_j #{i : j = φ(i)})^½, φ(i) = argmax_j x_jᵀ A x_i.

    Every token attends to one other in the end; the norm counts the most attended. Holds where the
    argmax is unique.

    Args:
        x: tokens.
        a: A.
        v: V.
        visible: which j row i sees; all by default.

    Returns:
        The limit per sequence.

    Source:
        Castin et al. 2024, Theorem 3.7, made exact.
    """
    logits = x @ a.mT @ x.mT
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    followers = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1).sum(-2)
    return spectral_norm_bound(v) * followers.amax(-1).sqrt()


def multi_head_bound(
    w: Float[Tensor, "heads width d_head"], head_bounds: Float[Tensor, "*batch heads"]
) -> Float[Tensor, "*batch"]:
    """Lip(Σ_h W_h f_h) ≤ min(Σ_h ‖W_h‖ L_h, ‖[W_1, …, W_H]‖ (Σ_h L_h²)^½), Lip(f_h) ≤ L_h.

    Args:
        w: output maps W_h, acting as x ↦ W_h x.
        head_bounds: L_h.

    Returns:
        The bound.

    Source:
        Castin et al. 2024, Lemma 3.8; the second form is ours.
    """
    one_by_one = (spectral_norm_bound(w) * head_bounds.double()).sum(-1)
    together = spectral_norm_bound(w.transpose(0, 1).flatten(1)) * head_bounds.double().norm(dim=-1)
    return torch.minimum(one_by_one, together) * (1 + 1e-15 * w.shape[0])


@dataclass(frozen=True)
class MassSplitting:
    """Local constants of attention at a measure Σ m_j δ_{x_j}, in the norm (Σ m_j ‖ε_j‖²)^½.

    Attributes:
        moving: ‖Df_m(X)‖, atoms moved as they are.
        splitting: max_i ‖V Cov_i A‖, one atom split in two that move apart.
        value: the larger: the constant when every atom may be duplicated first.
    """

    moving: Float[Tensor, ""]
    splitting: Float[Tensor, ""]
    value: Float[Tensor, ""]


def mass_splitting(
    x: Float[Tensor, "atoms width"],
    mass: Float[Tensor, "atoms"],
    a: Float[Tensor, "width width"],
    v: Float[Tensor, "width width"],
) -> MassSplitting:
    """max(‖Df_m(X)‖_m, max_i ‖V Cov_i A‖): splitting atoms pays only if the second is larger.

    Opposite moves of the copies of atom i leave every other weight alone, so they meet the block
    V Cov_i A only; moves in step are moves of the atom. Dense: for measures with few atoms.

    Args:
        x: atoms.
        mass: their masses, positive.
        a: A.
        v: V.

    Returns:
        Both constants and the larger.

    Source:
        Question of Castin et al. 2024 (v1); closed form ours, docs/numerics.md.
    """
    p = dot_product_weights(x, a, mass=mass)
    offset = x - (p @ x).unsqueeze(-2)  # (i, j, D): x_j − m_i
    covariance = (p.unsqueeze(-1) * offset).mT @ offset
    own = v @ covariance @ a
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    key = offset.unsqueeze(-1) * _pull(x, a, None)[:, None, None, :]
    blocks = p[..., None, None] * (v @ (identity + key))
    index = torch.arange(x.shape[0], device=x.device)
    blocks[index, index] += own
    scale = (mass.unsqueeze(-1) / mass).sqrt()[..., None, None]
    jacobian = (scale * blocks).transpose(1, 2).flatten(2).flatten(0, 1)
    moving = torch.linalg.matrix_norm(jacobian, 2)
    splitting = torch.linalg.matrix_norm(own, 2).amax()
    return MassSplitting(moving, splitting, torch.maximum(moving, splitting))


def _pull(x: Tensor, a: Tensor, shift: Tensor | None) -> Tensor:
    """A x_i + a, the gradient of row i's logits."""
    return x @ a.mT if shift is None else x @ a.mT + shift


def _worst_direction(a: Tensor) -> tuple[float, float, float, Tensor | None]:
    """γ, the positions of the lone token and of the others in units of R, and the direction u."""
    values, vectors = torch.linalg.eig(a.double())
    real = values.imag.abs() <= 1e-12 * values.abs().amax()
    if not bool(real.any()):
        return 0.0, 0.0, 0.0, None
    values, vectors = values.real[real], vectors.real[:, real]
    highest, lowest = values.argmax(), values.argmin()
    if values[highest] > -8 * values[lowest]:
        pick, rate, first, others = highest, float(values[highest]) / 8, 1.0, 0.5
    else:
        pick, rate, first, others = lowest, -float(values[lowest]), -1.0, 1.0
    return max(rate, 0.0), first, others, vectors[:, pick] / vectors[:, pick].norm()


def _exp(exponent: float) -> float:
    """e^x; inf where it leaves float64, and for NaN."""
    try:
        return math.inf if math.isnan(exponent) else math.exp(exponent)
    except OverflowError:
        return math.inf


def _down(value: float, exponent: float) -> float:
    """A finite number ≤ the exact one that rounding made ``value`` ≥ 0, with e^{±exponent} in it.

    The exponential multiplies the relative error of its argument by that argument; beyond
    ``LARGEST_EXPONENT`` there is nothing left of e^{−x}, and e^x is above every float64.
    """
    share = 1 - 1e-14 * (2 + min(exponent, LARGEST_EXPONENT))
    return min(value, sys.float_info.max) * share
