"""Local Lipschitz bounds: the operator norm of the Jacobian at given inputs, from above (ours).

Tied L2 attention f(X) = Σ_h P^h q^h G_h, q^h = X W_h, P^h = softmax(b_h − ‖q_i − q_j‖²/s), s = √d:

    dY_i = Σ_j P_ij dq_j + (2/s) C_i dq_i − (2/s) Σ_j P_ij (q_j − Y_i)(q_j − q_i)·dq_j

with Y = P q and C_i the P_i-covariance of q: a value, a query and a key term. Masks and biases
enter through P alone. docs/numerics.md has the proofs. Arguments of every bound for attention:

    q    queries X W_h as (*batch, heads, tokens, d_head)
    p    attention weights as (*batch, heads, tokens, tokens)
    w_q  W_h as (heads, width, d_head)
    g    output maps G_h as (heads, d_head, width)

The result is one bound per sequence, in float64, rounded outward. Inputs in float32 are taken at
face value: the bound is for the Jacobian at those numbers, with rows of P that sum to one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.heads import InputMaps, OutputMaps
from invformer.branches.rounded import outward, rounding, row_normalised, square_distances
from invformer.numerics.l2_attention import AttentionWeights, PerHead, merge_heads
from invformer.numerics.spectral_norm import spectral_norm_bound

PerSequence = Float[Tensor, "*batch"]


def token_max_local_bound(
    q: PerHead, p: AttentionWeights, w_q: InputMaps, g: OutputMaps, diagonal: bool = False
) -> PerSequence:
    """‖J‖ in token_max ≤ ‖[b_h σ_h G_h/t_h]_h‖₂ · max_i (Σ_h (t_h β_i^h/b_h)²)^½ for any t_h > 0.

    β are the :func:`token_gains`, b_h = max_i β_i^h, σ_h = ‖W_h‖₂. The least of t_h = 1,
    t_h² = b_h σ_h ‖G_h‖₂ and max_i Σ_h β_i^h σ_h ‖G_h‖₂ is returned. To rounding it is never above
    the global certificate, which has 4 φ⁻¹(n_h) + 1 for β and b. ``diagonal``: the same of the
    diagonal blocks ∂f_i/∂x_i, with :func:`diagonal_gains` for β.
    """
    beta = diagonal_gains(q, p) if diagonal else token_gains(q, p)
    worst = beta.amax(-1)
    (query, output), g = spectral_norm_bound(torch.stack([w_q.mT, g])), g.double()
    summed = (beta * (query * output)[:, None]).sum(-2).amax(-1)
    by_size = (worst * query * output).clamp_min(torch.finfo(g.dtype).tiny).sqrt()
    weights = torch.stack([torch.ones_like(worst), by_size])
    stacked = ((worst * query / weights)[..., None, None] * g).flatten(-3, -2)
    rows = ((weights / worst).unsqueeze(-1) * beta).square().sum(-2).amax(-1).sqrt()
    weighted = (spectral_norm_bound(stacked) * rows).amin(0)
    return outward(torch.minimum(summed, weighted), q)


def token_gains(q: PerHead, p: AttentionWeights) -> Float[Tensor, "*batch heads tokens"]:
    """β_i = (2/s) λ_max(C_i) + Σ_j P_ij ‖I − (2/s)(q_j − Y_i)(q_j − q_i)ᵀ‖₂ ≥ ‖dY_i‖/max_j ‖dq_j‖.

    With ‖I − abᵀ‖ ≤ 1 + ‖a‖‖b‖ it follows that β_i ≤ 4 φ⁻¹(n) + 1 at any input.
    """
    at = _Moments.of(q.double(), p)
    return 2 / at.s * at.covariance_norm + (at.p * at.key_and_value_norms).sum(-1)


def diagonal_gains(q: PerHead, p: AttentionWeights) -> Float[Tensor, "*batch heads tokens"]:
    """‖∂Y_i/∂q_i‖ = P_ii + (2/s) λ_max(C_i): the diagonal block of row i."""
    at = _Moments.of(q.double(), p)
    return at.p.diagonal(dim1=-2, dim2=-1) + 2 / at.s * at.covariance_norm


def fast_local_bound(q: PerHead, p: AttentionWeights, w_q: InputMaps, g: OutputMaps) -> PerSequence:
    """‖J‖ in frobenius ≤ ‖[G′_h]_h‖₂ (‖[W_h L_h]_h‖₂ max_h (max_j Σ_i P_ij)^½ + query + key).

    G_h = L_h G′_h by the better of two factorisations. ‖P‖₂ ≤ (largest column sum)^½ because rows
    sum to one. query and key are the terms of :func:`_query_and_key_terms`.
    O(N² d²) a head. Measured at 480 sequences of random layers (the study
    ``attention_distribution``): 1.5 to 6.6 times ‖J‖.
    """
    at = _Moments.of(q.double(), p)
    w = w_q.double()
    r_q = torch.linalg.qr(w).R  # ‖W M‖ = ‖R M‖
    attention = at.p.sum(-2).amax((-2, -1)).sqrt()
    bounds = []
    for left, stacked in _output_factors(w, g.double()):
        value = spectral_norm_bound(merge_heads(w @ left)) * attention
        query, key = _query_and_key_terms(at, r_q, left)
        bounds.append(stacked * (value + query + key))
    return outward(torch.stack(bounds).amin(0), q)


def tight_local_bound(
    q: PerHead, p: AttentionWeights, w_q: InputMaps, g: OutputMaps
) -> PerSequence:
    """‖J‖ in frobenius ≤ min(val + qry + key, (‖Σ_h W_h G_h‖² + (val_⊥ + qry + key)²)^½).

    The three terms are bounded one by one. A common shift of all tokens passes straight through,
    f(X + 1cᵀ) = f(X) + 1cᵀ Σ_h W_h G_h, so only its complement needs the triangle inequality, with
    P^h(I − 11ᵀ/N) for P^h in val_⊥. :func:`comparison_local_bound` is returned where it is smaller.
    Costs N spectral norms of D × D matrices a sample. Measured at the sequences of
    :func:`fast_local_bound`: 1.0 to 2.7 times ‖J‖; up to 3.2 times on other layers.
    """
    at = _Moments.of(q.double(), p)
    w, g = w_q.double(), g.double()
    query_and_key = 2 / at.s * (_tight_query_term(at, w, g) + _tight_key_term(at, w, g))
    value = _tight_value_term(at.p, w, g)
    centred = _tight_value_term(at.p - at.p.mean(-1, keepdim=True), w, g)
    shift = spectral_norm_bound((w @ g).sum(-3))
    bound = torch.minimum(value + query_and_key, torch.hypot(shift, centred + query_and_key))
    return torch.minimum(outward(bound, q), comparison_local_bound(q, p, w_q, g))


def comparison_local_bound(
    q: PerHead, p: AttentionWeights, w_q: InputMaps, g: OutputMaps
) -> PerSequence:
    """‖J‖ in frobenius ≤ ‖[G′_h]_h‖₂ ‖[K^h]_h‖₂, K_ij^h ≥ the norm of block (i, j) of head h.

    K_ij = P_ij min(‖W L‖ + (2/s)‖W b‖‖Lᵀa‖, ‖W‖‖I − (2/s) b aᵀ‖‖L‖) + δ_ij (2/s)‖W‖λ_max(C_i)‖L‖,
    a = q_j − Y_i, b = q_j − q_i, G_h = L_h G′_h. Best on adversarial inputs.
    """
    at = _Moments.of(q.double(), p)
    w = w_q.double()
    distance = _square_distances(at.q @ w.mT)
    bounds = []
    for left, stacked in _output_factors(w, g.double()):
        gain = (spectral_norm_bound(w) * spectral_norm_bound(left))[:, None, None]
        apart = spectral_norm_bound(w @ left)[:, None, None]
        apart = apart + 2 / at.s * (at.to_mean(left) * distance).sqrt()
        block = at.p * torch.minimum(apart, gain * at.key_and_value_norms)
        block = block + torch.diag_embed(2 / at.s * gain[..., 0] * at.covariance_norm)
        bounds.append(stacked * spectral_norm_bound(block.flatten(-3, -2)))
    return outward(torch.stack(bounds).amin(0), q)


@dataclass(frozen=True)
class _Moments:
    """q relative to the first token, P with rows summing to one, and the moments of q under P."""

    q: Tensor
    p: Tensor
    s: float

    @classmethod
    def of(cls, q: Tensor, p: Tensor) -> "_Moments":
        return cls(q - q[..., :1, :], row_normalised(p).to(q.dtype), math.sqrt(q.shape[-1]))

    @cached_property
    def y(self) -> Tensor:
        return self.p @ self.q

    @cached_property
    def slack(self) -> Tensor:
        """Rounding of every second moment, absolute, (…, H, 1)."""
        return rounding(self.q)

    @cached_property
    def covariance(self) -> Tensor:
        """C_i, (…, N, d, d)."""
        return covariance(self.p, self.q, self.q)

    @cached_property
    def covariance_norm(self) -> Tensor:
        """λ_max(C_i) from above."""
        return spectral_norm_bound(self.covariance) + self.slack

    @cached_property
    def key_and_value_norms(self) -> Tensor:
        """‖I − abᵀ‖ = ‖a‖‖b‖/2 + (1 − a·b + (‖a‖‖b‖/2)²)^½, a = (2/s)(q_j − Y_i), b = q_j − q_i."""
        q, y = self.q, self.y
        inner = q.square().sum(-1).unsqueeze(-2) - (q + y) @ q.mT + (q * y).sum(-1, keepdim=True)
        inner = 2 / self.s * (inner - self.slack.unsqueeze(-1))
        half = (self.to_mean() * _square_distances(q)).sqrt() / self.s
        return half + (1 - inner + half.square()).clamp_min(0).sqrt()

    def to_mean(self, left: Tensor | None = None) -> Tensor:
        """‖Lᵀ(q_j − Y_i)‖² from above."""
        u, mean = (self.q, self.y) if left is None else (self.q @ left, self.y @ left)
        return square_distances(mean, u, rounding(u).unsqueeze(-1))


def _output_factors(w: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """L_h and ‖[G′_h]_h‖₂ of G_h = L_h G′_h: orthonormal rows in G′_h, then L_h = 1/‖W_h‖₂.

    The first is best if heads write to different channels, the second if they share some.
    """
    q, r = torch.linalg.qr(g.mT)
    yield r.mT, spectral_norm_bound(q.mT.flatten(-3, -2))
    unit = spectral_norm_bound(w).clamp_min(torch.finfo(w.dtype).tiny)[:, None, None]
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    yield identity / unit, spectral_norm_bound((g * unit).flatten(-3, -2))


def _query_and_key_terms(at: _Moments, w: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """The query and key terms of the outputs (Y^h L_h)_h in frobenius, from above.

    query = (2/s) max_i (Σ_h ‖W_h C_i^h L_h‖²)^½
    key   = (2/s) max_j (Σ_h Σ_i P_ij^h λ_i^h ‖W_h(q_j − q_i)‖²)^½,  λ_i^h = ‖L_hᵀ C_i^h L_h‖
    """
    quick_norm = partial(spectral_norm_bound, num_steps=4)  # half the usual: many small matrices
    size = torch.linalg.matrix_norm(left)[:, None]
    covariance, left = at.covariance, left.unsqueeze(-3)
    query = quick_norm(w.unsqueeze(-3) @ covariance @ left)
    query = query + at.slack * size * torch.linalg.matrix_norm(w)[:, None]
    spread = quick_norm(left.mT @ covariance @ left) + at.slack * size.square()
    key = at.p * spread.unsqueeze(-1) * _square_distances(at.q @ w.mT)
    return (
        2 / at.s * query.square().sum(-2).amax(-1).sqrt(),
        2 / at.s * key.sum((-3, -2)).amax(-1).sqrt(),
    )


def _tight_value_term(p: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """‖Σ_h P^h ⊗ W_h G_h‖ from above: head by head, or the heads' mean and deviations from it."""
    mean = p.mean(-3)
    from_mean = spectral_norm_bound(mean) * spectral_norm_bound((w @ g).sum(-3))
    each, deviation = spectral_norm_bound(p), spectral_norm_bound(p - mean.unsqueeze(-3))
    bounds = []
    for left, stacked in _output_factors(w, g):
        for rest, norms in ((0, each), (from_mean, deviation)):
            weighted = merge_heads(norms[..., None, None] * (w @ left))
            bounds.append(rest + stacked * spectral_norm_bound(weighted))
    return torch.stack(bounds).amin(0)


def _tight_query_term(at: _Moments, w: Tensor, g: Tensor) -> Tensor:
    """max_i ‖Σ_h W_h C_i^h G_h‖: the query term (without 2/s) exactly, as it is block-diagonal."""
    slack = (at.slack * (spectral_norm_bound(w) * spectral_norm_bound(g))[:, None]).sum((-2, -1))
    blocks = (w.unsqueeze(-3) @ at.covariance @ g.unsqueeze(-3)).sum(-4)
    return spectral_norm_bound(blocks).amax(-1) + slack


def _tight_key_term(at: _Moments, w: Tensor, g: Tensor) -> Tensor:
    """The least of κ(Λ) and, for both factorisations, ‖[G′]‖ κ(λ) and ‖[G′]‖‖[K^h]_h‖.

    Λ_i = λ_max(Σ_h G_hᵀ C_i^h G_h), λ_i^h = λ_max(L_hᵀ C_i^h L_h); the rank-one blocks have norms
    K_ij = P_ij ‖L_hᵀ(q_j − Y_i)‖‖W_h(q_j − q_i)‖.
    """
    slack = (at.slack * spectral_norm_bound(g).square()[:, None]).sum(-2)
    blocks = (g.mT.unsqueeze(-3) @ at.covariance @ g.unsqueeze(-3)).sum(-4)
    bounds = [_kappa(at, w, (spectral_norm_bound(blocks) + slack).unsqueeze(-2))]
    distance = _square_distances(at.q @ w.mT)
    for left, stacked in _output_factors(w, g):
        slack = at.slack * spectral_norm_bound(left).square()[:, None]
        blocks = left.mT.unsqueeze(-3) @ at.covariance @ left.unsqueeze(-3)
        bounds.append(stacked * _kappa(at, w, spectral_norm_bound(blocks) + slack))
        lengths = at.p * (at.to_mean(left) * distance).sqrt()
        bounds.append(stacked * spectral_norm_bound(lengths.flatten(-3, -2)))
    return torch.stack(bounds).amin(0)


def _kappa(at: _Moments, w: Tensor, weight: Tensor) -> Tensor:
    """max_j λ_max(Σ_h Σ_i P_ij w_i W_h (q_j − q_i)(q_j − q_i)ᵀ W_hᵀ)^½ for weights w_i ≥ 0."""
    r = (at.p * weight.unsqueeze(-1)).mT
    mass, mean = r.sum(-1)[..., None, None], (r @ at.q).unsqueeze(-1)
    second = (r @ _outer(at.q, at.q).flatten(-2)).unflatten(-1, 2 * at.q.shape[-1:])
    q = at.q.unsqueeze(-1)
    spread = mass * (q @ q.mT) - q @ mean.mT - mean @ q.mT + second
    slack = at.slack * r.sum(-1) * spectral_norm_bound(w).square()[:, None]
    blocks = (w.unsqueeze(-3) @ spread @ w.mT.unsqueeze(-3)).sum(-4)
    return (spectral_norm_bound(blocks) + 4 * slack.sum(-2)).amax(-1).sqrt()


def covariance(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_j P_ij a_j b_jᵀ − (Σ_j P_ij a_j)(Σ_j P_ij b_j)ᵀ for every i."""
    second = (p @ _outer(a, b).flatten(-2)).unflatten(-1, (a.shape[-1], b.shape[-1]))
    return second - _outer(p @ a, p @ b)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a_j b_jᵀ for every row."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _square_distances(z: Tensor) -> Tensor:
    """‖z_j − z_i‖² from above."""
    return square_distances(z, z, rounding(z).unsqueeze(-1))
