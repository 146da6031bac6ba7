"""Attention in the unit ball: its global constants, and its local ones at a text (ours).

    Y_i = Σ_j P_ij v_j,  P_i = softmax_j(τ q_i·k_j + b_ij),  q, k, v = ψ(X W_Q), ψ(X W_K), ψ(X W_V)

with ψ(z) = z/√(1 + ‖z‖²), whose Jacobian has the norm ρ(u) = √(1 − ‖u‖²) at u = ψ(z). σ are the
spectral norms of the three matrices. docs/numerics.md §16 has the proofs.

**Theorem (token_max).** For every mask, bias and length, Lip(Y) ≤ √(σ_V² + τ² max(σ_Q, σ_K)²).

The proof bounds the three terms of dY_i = E[dv] + τ Cov(v, k) dq_i + τ E[(v − Y_i)(q_i·dk)], where
E and Cov belong to row P_i. The local bounds are the same with the numbers of the text at hand.

**Theorem (diagonal block).** If only x_i moves, ‖dY_i‖ ≤ ‖dx_i T‖, T = [τ W_Q, τ W_K/2, W_V]. If a
token does not see itself, only the query term is left and T = τ W_Q: ‖Cov(v, k)‖₂ ≤ 1.

Arguments below: ``w_qkv`` has W_Q, W_K and W_V of every head, ``temperature`` is τ ≥ 0, and ``g``
has the maps G_h of F(X) = Σ_h Y^h G_h, every constant folded in. The global constants are those of
several layers at once.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.heads import (
    OfHeads,
    OutputMaps,
    bound_of_blocks,
    separate_inputs,
    shared_input,
)
from invformer.branches.rounded import outward, row_normalised, square_distances
from invformer.numerics.ball import AttentionPoint
from invformer.numerics.norms import Norm, unknown_norm
from invformer.numerics.rounding import product_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

Projections = Float[Tensor, "*layers 3 heads width d_head"]
Temperatures = Float[Tensor, "*layers heads"]


def head_gains(w_qkv: Projections, temperature: Temperatures) -> OfHeads:
    """√(σ_V² + τ² max(σ_Q, σ_K)²) of every head, rounded up."""

    def gain(query: float, key: float, value: float, tau: float) -> float:
        logit = product_up(tau, max(query, key))
        return sqrt_up(sum_up(product_up(value, value), product_up(logit, logit)))

    norms = zip(spectral_norm_bound(w_qkv).tolist(), temperature.tolist(), strict=True)
    return [list(map(gain, *of_layer, tau)) for of_layer, tau in norms]


def token_max_bounds(w_qkv: Projections, temperature: Temperatures, g: OutputMaps) -> list[float]:
    """Lip(F) in token_max, for any mask, bias and number of tokens."""
    return separate_inputs(head_gains(w_qkv, temperature), g, spectral_norm_bound(g).tolist())


def causal_bounds(
    w_qkv: Projections,
    temperature: Temperatures,
    g: OutputMaps,
    weights: OfHeads,
    strictly_causal: bool = False,
) -> list[float]:
    """sup ‖∂F_i/∂x_i‖₂ ≤ min_w ‖[w_h G_h]_h‖₂ ‖[T_h/w_h]_h‖₂, for any causal mask and bias.

    Earlier tokens are held fixed: it is *not* a Lipschitz constant of F. The token_max constant
    bounds the diagonal blocks too, and is returned if it is smaller. ``weights`` are w_h to try
    besides ‖T_h‖₂, for instance the numbers G_h was divided by.
    """
    query, key, value = w_qkv.detach().double().unbind(1)
    tau = temperature.detach().double()[..., None, None]
    t = tau * query if strictly_causal else torch.cat([tau * query, tau / 2 * key, value], dim=-1)
    bounds = shared_input([[1.0] * t.shape[1]] * len(t), t, g, weights)
    rounding = 1 + 2.0**-50 * t.shape[-2]  # products with τ round every entry by 2⁻⁵³ of itself
    bounds = [product_up(bound, rounding) for bound in bounds]
    return list(map(min, bounds, token_max_bounds(w_qkv, temperature, g)))


def lipschitz_bounds(
    w_qkv: Projections, temperature: Temperatures, g: OutputMaps, norm: Norm, num_tokens: int
) -> list[float]:
    """Lip(F) in any norm: in frobenius ≤ √N times, in entry_max ≤ √D times that in token_max.

    Because ‖dF‖_F ≤ √N max_i ‖dF_i‖ and max_j ‖dx_j‖ ≤ ‖dX‖_F, and ‖x‖_∞ ≤ ‖x‖₂ ≤ √D ‖x‖_∞.
    """
    squares = {"token_max": 1, "frobenius": num_tokens, "entry_max": w_qkv.shape[-2]}
    if norm not in squares:
        raise unknown_norm(norm)
    factor = sqrt_up(float(squares[norm]))
    return [product_up(factor, bound) for bound in token_max_bounds(w_qkv, temperature, g)]


def local_bound(
    at: AttentionPoint,
    w_qkv: Projections,
    g: OutputMaps,
    measured: Literal["token_max", "frobenius", "diagonal_block"],
    strictly_causal: bool = False,
    tight: bool = False,
) -> Float[Tensor, "*batch"]:
    """‖J‖ at a text by :func:`.bound_of_blocks`, from those of :func:`comparison`."""
    blocks = comparison(at, w_qkv, strictly_causal)
    return outward(bound_of_blocks(blocks, g.double(), measured, tight), at.q)


def comparison(
    at: AttentionPoint, w_qkv: Projections, strictly_causal: bool
) -> Float[Tensor, "*batch heads tokens tokens"]:
    """B_ij ≥ ‖∂Y_i/∂x_j‖₂ per head: P_ij (σ_V ρ(v_j) + τ σ_K ‖q_i‖ρ(k_j)‖v_j − Y_i‖), and on the
    diagonal also τ σ_Q ρ(q_i) √(E‖v − Y_i‖² E‖k − E k‖²). In float64.

    Strictly causal, the keys and values in ``at`` are those of the token before, zero at first.
    """
    query, key, value = spectral_norm_bound(w_qkv)[..., None, None]
    q, rho_q, k, rho_k, v, rho_v, p, temperature = (t.double() for t in at)
    p = row_normalised(p)
    slack = 16 * sum(q.shape[-2:]) * torch.finfo(q.dtype).eps  # of points in the unit ball
    apart = square_distances(p @ v, v, slack)
    spread_v = (p * apart).sum(-1, keepdim=True)
    spread_k = (p * square_distances(p @ k, k, slack)).sum(-1, keepdim=True)
    length = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    along_key = temperature * key * length * rho_k.mT * apart.sqrt()
    at_query = temperature * query * rho_q * (spread_v * spread_k).sqrt()
    of_others = p * (value * rho_v.mT + along_key)
    if strictly_causal:  # column j is token j − 1; the first is no token's
        of_others = torch.nn.functional.pad(of_others, (0, 1))[..., 1:]
    return of_others + torch.diag_embed(at_query.squeeze(-1))
