"""Dot-product attention: its Lipschitz constants on bounded inputs.

Castin, Ablin & Peyré 2024, *How Smooth Is Attention?*, arXiv 2312.14820, in the paper's notation
(rows of X are tokens x_i ∈ R^D, A = KᵀQ/√k, V acts as x ↦ V x):

    f(X)_i = V Σ_j P_ij x_j,    P_ij ∝ m_j exp(x_jᵀ A x_i) over the visible j

with masses m (1 for a plain sequence). f is not Lipschitz on all inputs; constants here are in
``frobenius`` and for tokens of length ≤ R, masked or not. Upper bounds are rounded up, to inf.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Tokens
from invformer.numerics.rounding import round_up
from invformer.numerics.spectral_norm import spectral_norm_bound

Square = Float[Tensor, "width width"]
Mask = Bool[Tensor, "tokens tokens"]
Masses = Float[Tensor, "tokens"]
Measure = tuple[Tokens, Masses, Square, Square]  # atoms, their masses and two matrices


def dot_product_weights(
    x: Tokens, a: Square, *, visible: Mask | None = None, mass: Masses | None = None
) -> Float[Tensor, "*batch tokens tokens"]:
    """P_ij ∝ m_j exp(x_jᵀ A x_i) over the visible j (Definitions 2.1, 2.5 and C.4)."""
    logits = x @ a.mT @ x.mT
    if mass is not None:
        logits = logits + mass.log()
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    return logits.softmax(-1)


def two_cluster_tokens(a: Square, radius: float, num_tokens: int) -> Tokens:
    """The attack: one token at R u, the others at R u/2; or one at −R u, the others at R u.

    u is the unit eigenvector of γ_max if γ_max > −8 γ_min, of γ_min otherwise, the largest and the
    smallest real eigenvalue of A; γ = max(−γ_min, γ_max/8) is the rate. Here the constant of
    dot-product attention grows like √n; that of tied L2 attention does not. The lone token is the
    first. Source: Castin et al. 2024, Prop. 3.4 and Lemma C.7.
    """
    values, vectors = torch.linalg.eig(a.double())
    real = values.imag.abs() <= 1e-12 * values.abs().amax()
    values, vectors = values.real[real], vectors.real[:, real]
    pick, first, others = values.argmin(), -1.0, 1.0
    if values.max() > -8 * values.min():
        pick, first, others = values.argmax(), 1.0, 0.5
    u = vectors[:, pick] / vectors[:, pick].norm()
    position = torch.full((num_tokens, 1), others * radius, dtype=u.dtype, device=u.device)
    position[0] = first * radius
    return position * u


def mean_field_bound(norm_a: float, norm_v: float, radius: float, *, masked: bool = False) -> float:
    """Lip(F) ≤ c ‖V‖ (1 + 3‖A‖R²) e^{2‖A‖R²} of attention on probability measures on B_R.

    c = 1 for the distance W₂; c = 2 if ``masked``, for d₂² = ∫ W₂(μ^τ, ν^τ)² dτ: with c = 1 the
    masked statement is false (A = 0 is the Cesàro mean: its norm tends to 2, by Hardy).
    Source: Castin et al. 2024, Theorems 3.5 and 4.4; the factor c is ours.
    """
    bend = norm_a * radius * radius
    growth = math.exp(2 * bend) if bend < 354 else math.inf
    bound = (2 if masked else 1) * growth * (1 + 3 * bend)
    return round_up(norm_v * bound, 12 + math.ceil(8 * bend))


def large_radius_limit(
    x: Tokens, a: Square, v: Square, visible: Mask | None = None
) -> Float[Tensor, "*batch"]:
    """lim_{R→∞} ‖Df(R X)‖ = ‖V‖ (max_j #{i : j = φ(i)})^½, φ(i) = argmax_j x_jᵀ A x_i.

    Holds where the argmax is unique. Source: Castin et al. 2024, Theorem 3.7, made exact.
    """
    p = dot_product_weights(x, a, visible=visible)
    followers = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1).sum(-2)
    return spectral_norm_bound(v) * followers.amax(-1).sqrt()


def multi_head_bound(
    w: Float[Tensor, "heads width d_head"], head_bounds: Float[Tensor, "*batch heads"]
) -> Float[Tensor, "*batch"]:
    """Lip(Σ_h W_h f_h) ≤ min(Σ_h ‖W_h‖ L_h, ‖[W_1, …, W_H]‖ (Σ_h L_h²)^½), Lip(f_h) ≤ L_h.

    Source: Castin et al. 2024, Lemma 3.8; the second form is ours.
    """
    one_by_one = (spectral_norm_bound(w) * head_bounds.double()).sum(-1)
    together = spectral_norm_bound(w.transpose(0, 1).flatten(1)) * head_bounds.double().norm(dim=-1)
    return torch.minimum(one_by_one, together) * (1 + 1e-15 * w.shape[0])


class MassSplitting(NamedTuple):
    """Local constants of attention at a measure Σ m_j δ_{x_j}, in the norm (Σ m_j ‖ε_j‖²)^½.

    The larger one is the constant when every atom may be duplicated first.
    """

    moving: Float[Tensor, "*batch"]  # ‖Df_m(X)‖, atoms moved as they are
    splitting: Float[Tensor, "*batch"]  # max_i ‖V Cov_i A‖, one atom split in two that move apart


def mass_splitting(x: Tokens, mass: Masses, a: Square, v: Square) -> MassSplitting:
    """max(‖Df_m(X)‖_m, max_i ‖V Cov_i A‖): splitting atoms pays only if the second is larger.

    Opposite moves of the copies of atom i leave every other weight alone, so they meet the block
    V Cov_i A only; moves in step are moves of the atom. Dense: for measures with few atoms.
    Source: a question of Castin et al. 2024 (v1); closed form ours, docs/numerics.md.
    """
    p = dot_product_weights(x, a, mass=mass)
    offset = x.unsqueeze(-3) - (p @ x).unsqueeze(-2)  # (i, j, D): x_j − m_i
    covariance = (p.unsqueeze(-1) * offset).mT @ offset
    own = v @ covariance @ a
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    key = offset.unsqueeze(-1) * (x @ a.mT)[..., None, None, :]
    return from_blocks(p[..., None, None] * (v @ (identity + key)), own, mass)


def from_blocks(
    blocks: Float[Tensor, "*batch atoms atoms width width"],
    own: Float[Tensor, "*batch atoms width width"],
    mass: Masses,
) -> MassSplitting:
    """The constants from the shared blocks (i, j) and the query blocks i of the Jacobian."""
    eye = torch.eye(len(mass), dtype=mass.dtype, device=mass.device)[..., None, None]
    root = (mass[:, None] / mass).sqrt()[..., None, None]
    whole = root * (blocks + eye * own.unsqueeze(-3))
    moving = torch.linalg.matrix_norm(whole.transpose(-3, -2).flatten(-4, -3).flatten(-2), 2)
    return MassSplitting(moving, torch.linalg.matrix_norm(own, 2).amax(-1))


def attention(
    a: Square, v: Square, *, visible: Mask | None = None, mass: Masses | None = None
) -> SequenceMap:
    """f_m(X)_i = V Σ_j P_ij x_j with the weights of :func:`dot_product_weights`."""
    return lambda x: dot_product_weights(x, a, visible=visible, mass=mass) @ x @ v.mT


def differentiated_constant(f: SequenceMap, x: Tokens, mass: Masses) -> float:
    """‖Df(X)‖ in the norm (Σ_i m_i ‖ε_i‖²)^½, by automatic differentiation and a dense SVD."""
    root = mass.sqrt().repeat_interleave(x.shape[1])
    dense = torch.func.jacrev(f)(x).reshape(x.numel(), x.numel())
    return torch.linalg.matrix_norm(root[:, None] * dense / root, 2).item()
