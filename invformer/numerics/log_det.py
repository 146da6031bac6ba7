"""log|det(I + J)| of y = x + f(x), J = ∂f/∂x: exactly, or without bias for any contraction.

A normalising flow adds this to its log-density. For example, with a causal f:

    f, x = lambda x: 0.05 * x.cumsum(-2).tanh(), torch.randn(2, 5, 3)
    exact = causal_log_det(f, x)                                             # one value per sample
    guess = log_det_estimate(linearise(f, x), lipschitz_bound=0.5)           # needs ‖J‖ < 1
    assert ((guess.value - exact).abs() <= 4 * guess.standard_error).all()
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.linear_map import LinearMap, SequenceMap


def causal_log_det(
    f: SequenceMap, x: Float[Tensor, "*batch tokens width"]
) -> Float[Tensor, "*batch"]:
    """log|det(I + J)| = Σ_t log|det(I + J_tt)|, J_tt = ∂f_t/∂x_t, exact for causal f.

    J is block lower-triangular in time, so only the D × D blocks of its diagonal count. Cost: N·D
    products with Jᵀ, D of them at a time, and N determinants of D × D. Each product also shows
    whether later tokens have influence.

    Raises:
        ValueError: f is not causal: some f_t depends on a token after t.
    """
    tokens, width = x.shape[-2:]
    identity = torch.eye(width, dtype=x.dtype, device=x.device)
    total = torch.zeros(x.shape[:-2], dtype=x.dtype, device=x.device)
    with torch.inference_mode(False):
        _, pull_back, *_ = torch.func.vjp(f, x.detach().clone())
        for t in range(tokens):
            # One cotangent per output channel of token t: (D, *batch, N, D).
            seeds = torch.zeros(width, *x.shape, dtype=x.dtype, device=x.device)
            seeds[..., t, :] = identity.view(width, *(1,) * (x.ndim - 2), width)
            rows = torch.func.vmap(lambda g: pull_back(g)[0])(seeds).detach()
            if bool((rows[..., t + 1 :, :] != 0).any()):
                raise ValueError(
                    f"f is not causal: token {t} depends on later ones; use log_det_estimate"
                )
            block = rows[..., t, :].movedim(0, -2)
            total = total + torch.linalg.slogdet(identity + block).logabsdet
    return total


@dataclass(frozen=True)
class LogDetEstimate:
    """An unbiased estimate of log|det(I + J)|, per sample."""

    value: Float[Tensor, "*batch"]  # mean over the probes
    standard_error: Float[Tensor, "*batch"]  # of that mean; infinite for a single probe


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
        num_probes: independent repetitions, at least one.
        generator: for v and n; one n serves the whole batch.

    Source: Chen et al. 2019, arXiv 1906.02735, Theorem 1 and §3.1.
    """
    if not 0 <= lipschitz_bound < 1:
        raise ValueError(f"lipschitz_bound must be in [0, 1), got {lipschitz_bound}")
    go_on, draws = max(0.5, lipschitz_bound), []
    for _ in range(num_probes):
        uniform = torch.rand((), dtype=torch.float64, device=jacobian.device, generator=generator)
        further = int(torch.log1p(-uniform) / math.log(go_on))  # P(further ≥ k) = go_onᵏ
        coin = torch.rand(jacobian.shape, device=jacobian.device, generator=generator) < 0.5
        power = probe = torch.where(coin, 1.0, -1.0).to(jacobian.dtype)
        total = torch.zeros(jacobian.shape[:-2], dtype=torch.float64, device=jacobian.device)
        for k in range(1, num_exact_terms + further + 1):
            power = jacobian.jvp(power)
            trace = (probe.double() * power.double()).sum((-2, -1))
            survival = go_on ** max(0, k - num_exact_terms)
            total = total + (-1) ** (k + 1) * trace / (k * survival)
        draws.append(total)
    values = torch.stack(draws)
    error = values.std(0) / math.sqrt(num_probes) if num_probes > 1 else values[0] * 0 + math.inf
    return LogDetEstimate(values.mean(0), error)
