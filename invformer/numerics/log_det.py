"""log|det(I + J_f)| of a residual layer: exactly for causal f, unbiasedly for any contraction."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.linear_map import LinearMap, SequenceMap


def causal_log_det(
    f: SequenceMap, x: Float[Tensor, "*batch tokens width"], *, token_wise: bool = False
) -> Float[Tensor, "*batch"]:
    """log|det(I + J)| = Σ_t log|det(I + J_tt)|, J_tt = ∂f_t/∂x_t, exact for causal f.

    J is block lower-triangular in time, so only the D × D blocks of its diagonal count. Cost: that
    of :func:`diagonal_blocks`, and N determinants of D × D. L2 attention has its blocks in closed
    form: ``log_det_of_blocks(l2_attention_diagonal_blocks(…))`` needs no product with J.

    Args:
        f: a causal map (f_t depends on x_{≤t} only).
        x: where.
        token_wise: promise that f_t depends on x_t only, as in a feed-forward: N times cheaper.

    Returns:
        One value per sample.

    Raises:
        ValueError: f is not causal, or not token-wise although promised.
    """
    return log_det_of_blocks(diagonal_blocks(f, x, token_wise=token_wise))


def log_det_of_blocks(
    blocks: Float[Tensor, "*batch tokens width width"],
) -> Float[Tensor, "*batch"]:
    """Σ_t log|det(I + J_tt)| from the diagonal blocks J_tt."""
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    return torch.linalg.slogdet(identity + blocks).logabsdet.sum(-1)


def diagonal_blocks(
    f: SequenceMap, x: Float[Tensor, "*batch tokens width"], *, token_wise: bool = False
) -> Float[Tensor, "*batch tokens width width"]:
    """J_tt = ∂f_t/∂x_t of every token, row = output channel, by reverse-mode products.

    Cost: N·D products with Jᵀ (D if ``token_wise``), D of them at a time: memory D times that of a
    backward pass through f. Each product of a causal map also shows that later tokens have no
    influence, which is checked; ``token_wise`` is checked on one random direction.

    Args:
        f: a causal map, or a token-wise one.
        x: where.
        token_wise: promise that f_t depends on x_t only.

    Returns:
        One D × D block per token.

    Raises:
        ValueError: f is not what it must be.
    """
    tokens, width = x.shape[-2:]
    with torch.inference_mode(False):
        y, pull_back, *_ = torch.func.vjp(f, x.detach().clone())
        rows = torch.func.vmap(lambda g: pull_back(g)[0])
        if token_wise:
            seeds = _seeds(y, slice(None))
            blocks = rows(seeds).movedim(0, -2).detach()
            _check_token_wise(pull_back, blocks)
            return blocks
        blocks = torch.zeros(*x.shape[:-2], tokens, width, width, dtype=x.dtype, device=x.device)
        for t in range(tokens):
            products = rows(_seeds(y, slice(t, t + 1))).detach()
            if bool((products[..., t + 1 :, :] != 0).any()):
                raise ValueError(
                    f"f is not causal: token {t} depends on later ones; use log_det_estimate"
                )
            blocks[..., t, :, :] = products[..., t, :].movedim(0, -2)
    return blocks


def _seeds(y: Tensor, tokens: slice) -> Tensor:
    """One direction per output channel, (D, *batch, N, D): that channel of the given tokens."""
    width = y.shape[-1]
    seeds = torch.zeros(width, *y.shape, dtype=y.dtype, device=y.device)
    channel = torch.arange(width, device=y.device)
    seeds.movedim(0, -1)[..., tokens, channel, channel] = 1
    return seeds


def _check_token_wise(pull_back: Callable, blocks: Tensor) -> None:
    """Jᵀg must be blockwise J_ttᵀ g_t for a random g: almost surely false if tokens are mixed."""
    generator = torch.Generator(blocks.device).manual_seed(0)
    g = torch.randn(
        blocks.shape[:-1], dtype=blocks.dtype, device=blocks.device, generator=generator
    )
    expected = (g.unsqueeze(-2) @ blocks).squeeze(-2)
    difference = (pull_back(g)[0].detach() - expected).abs().amax()
    if bool(difference > 1e3 * torch.finfo(g.dtype).eps * (1 + expected.abs().amax())):
        raise ValueError("f mixes tokens: token_wise=True does not hold")


def l2_attention_diagonal_blocks(
    q: Float[Tensor, "*batch heads tokens d_head"],
    p: Float[Tensor, "*batch heads tokens tokens"],
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width"],
) -> Float[Tensor, "*batch tokens width width"]:
    """J_tt of tied L2 attention f(X)_i = Σ_h (P^h q^h)_i G_h, in closed form.

        J_ttᵀ = Σ_h W^Q_h [(2/√d) Cov_{P_t}(q^h) + P_tt I] G_h

    Cost O(N² D d + N D² d) time and O(N d² H + N D²) memory per sample; no product with J.

    Args:
        q: X W^Q_h of every head.
        p: its attention weights, causal (or not: the blocks are right, their determinants are then
            not those of J).
        w_q: W^Q_h.
        g: G_h, all constants folded in.

    Returns:
        One D × D block per token, row = output channel.

    Source: ours, docs/numerics.md.
    """
    y = p @ q
    second_moment = torch.einsum("...ij,...jk,...jl->...ikl", p, q, q)
    covariance = second_moment - y.unsqueeze(-1) * y.unsqueeze(-2)
    itself = p.diagonal(dim1=-2, dim2=-1)[..., None, None]
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    head = (2 / math.sqrt(q.shape[-1])) * covariance + itself * identity
    return torch.einsum("hak,...htkl,hlb->...tba", w_q, head, g)


@dataclass(frozen=True)
class LogDetEstimate:
    """An unbiased estimate of log|det(I + J)|, per sample.

    Attributes:
        value: mean over the probes.
        standard_error: of that mean, estimated from the probes; infinite for a single probe.
        num_terms: products with J per sample, all probes together.
    """

    value: Float[Tensor, "*batch"]
    standard_error: Float[Tensor, "*batch"]
    num_terms: int


@torch.no_grad()
def log_det_estimate(
    jacobian: LinearMap,
    *,
    lipschitz_bound: float,
    num_probes: int = 16,
    num_exact_terms: int = 8,
    generator: torch.Generator | None = None,
) -> LogDetEstimate:
    """log det(I + J) = Σ_k (−1)^{k+1} tr(J^k)/k, estimated without bias by random truncation.

        E[Σ_{k ≤ n} (−1)^{k+1} vᵀJ^k v / (k P(n ≥ k))],   v of random signs, n random

    The first ``num_exact_terms`` terms are always there; every further one with probability
    q = max(½, c), so P(n ≥ k) = q^{k − exact}: the k-th term's variance then falls like c^k.
    Unbiased for every q, up to rounding. Cost: about exact + 1/(1 − q) products a probe.

    Args:
        jacobian: J; ‖J‖ < 1 in some norm, which makes the series converge.
        lipschitz_bound: c < 1, a bound on ‖J‖ in any norm; it only sets q.
        num_probes: independent repetitions.
        num_exact_terms: terms that are never truncated.
        generator: for v and n; one n serves the whole batch.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: the numbers allow no estimate.

    Source: Chen et al. 2019, arXiv 1906.02735, Theorem 1 and §3.1.
    """
    if not 0 <= lipschitz_bound < 1:
        raise ValueError(f"lipschitz_bound must be in [0, 1), got {lipschitz_bound}")
    if num_probes < 1 or num_exact_terms < 1:
        raise ValueError("num_probes and num_exact_terms must be at least 1")
    go_on = max(0.5, lipschitz_bound)
    draws, num_terms = [], 0
    for _ in range(num_probes):
        further = _geometric(go_on, generator, jacobian.device)
        probe = _random_signs(jacobian, generator)
        power, total = probe, torch.zeros(jacobian.shape[:-2], dtype=torch.float64)
        total = total.to(jacobian.device)
        for k in range(1, num_exact_terms + further + 1):
            power = jacobian.jvp(power)
            survival = go_on ** max(0, k - num_exact_terms)
            trace = (probe.double() * power.double()).sum((-2, -1))
            total = total + (-1) ** (k + 1) * trace / (k * survival)
        draws.append(total)
        num_terms += num_exact_terms + further
    values = torch.stack(draws)
    error = values.std(0) / math.sqrt(num_probes) if num_probes > 1 else values[0] * 0 + math.inf
    return LogDetEstimate(value=values.mean(0), standard_error=error, num_terms=num_terms)


def _geometric(go_on: float, generator: torch.Generator | None, device: torch.device) -> int:
    """n ≥ 0 with P(n ≥ k) = go_on^k."""
    uniform = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    return int(torch.log1p(-uniform) / math.log(go_on))


def _random_signs(jacobian: LinearMap, generator: torch.Generator | None) -> Tensor:
    coin = torch.rand(jacobian.shape, device=jacobian.device, generator=generator) < 0.5
    return torch.where(coin, 1.0, -1.0).to(jacobian.dtype)
