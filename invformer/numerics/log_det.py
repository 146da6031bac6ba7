"""log|det(I + J)| of y = x + f(x), J = ∂f/∂x: exactly for a causal f, estimated for any.

A normalising flow adds this to its log-density. For example:

    f, x = lambda x: 0.05 * x.cumsum(-2).tanh(), torch.randn(2, 5, 3)
    exact = causal_log_det(f, x)                                             # one value per sample
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Tokens


def causal_log_det(f: SequenceMap, x: Tokens) -> Float[Tensor, "*batch"]:
    """log|det(I + J)| = Σ_t log|det(I + J_tt)|, J_tt = ∂f_t/∂x_t, exact for causal f.

    J is block lower-triangular in time, so only the D × D blocks of its diagonal count. Cost: N·D
    products with Jᵀ, D of them at a time, and N determinants of D × D. Each product also shows
    whether later tokens have influence: then ValueError. Gradients for x and for weights of f are
    recorded.
    """
    tokens, width = x.shape[-2:]
    identity = torch.eye(width, dtype=x.dtype, device=x.device)
    total = torch.zeros(x.shape[:-2], dtype=x.dtype, device=x.device)
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        _, pull_back, *_ = torch.func.vjp(f, x.clone())
        for t in range(tokens):
            # One cotangent per output channel of token t: (D, *batch, N, D).
            seeds = torch.zeros(width, *x.shape, dtype=x.dtype, device=x.device)
            seeds[..., t, :] = identity.view(width, *(1,) * (x.ndim - 2), width)
            rows = torch.func.vmap(lambda g: pull_back(g)[0])(seeds)
            if bool((rows[..., t + 1 :, :] != 0).any()):
                raise ValueError(f"f is not causal: token {t} depends on later ones")
            block = rows[..., t, :].movedim(0, -2)
            total = total + torch.linalg.slogdet(identity + block).logabsdet
    return total


@dataclass(frozen=True)
class LogDetEstimate:
    """An estimate of log|det(I + J)|, per sample.

    Attributes:
        value: mean over the probes, (*batch); its gradients are unbiased or as biased as it is.
        standard_error: of that mean, from the spread of the probes; NaN for a single probe.
        tail: proven bound on the bias, the terms that a fixed cut leaves out; 0.0 for a random cut.
    """

    value: Float[Tensor, "*batch"]
    standard_error: Float[Tensor, "*batch"]
    tail: float


def estimate_log_det(
    f: SequenceMap,
    x: Tokens,
    *,
    lipschitz_bound: float,
    num_terms: int | None = None,
    num_probes: int = 1,
    generator: torch.Generator | None = None,
) -> LogDetEstimate:
    """log|det(I + J)| = Σ_{k≥1} (−1)^{k+1} tr(Jᵏ)/k for any f, with tr(Jᵏ) = E[vᵀJᵏv].

    v has independent signs (Hutchinson). With a fixed cut after n = ``num_terms`` terms the bias is
    at most Σ_{k>n} d cᵏ/k ≤ d c^{n+1}/((n+1)(1−c)), d = N D, since no eigenvalue of J exceeds c
    (one of diagonal blocks is enough for causal f). Without ``num_terms`` each probe of a sample
    draws its cut n, P(n ≥ k) = c^{k−2} for k > 2, and divides term k by that: unbiased, with finite
    variance (Chen et al. 2019, arXiv 1906.02735, who draw geometric cuts as well).

    Gradients for x and for weights of f are those of E[vᵀ(I + J)⁻¹∂J v] by the same cut (their
    Neumann series): one product more, memory of one product. Cost: one backward pass of f for
    every term. Second derivatives of f are needed for gradients: fused attention has none.

    Args:
        x: (*batch, N, D).
        lipschitz_bound: c < 1, proven for f in any norm, or for the diagonal blocks of a causal f.
        num_probes: m; the standard error falls as 1/√m.
        generator: of probes and cuts, on the device of x.

    Raises:
        ValueError: c is not in [0, 1), or a number is not positive.
    """
    if not 0 <= lipschitz_bound < 1 or num_probes < 1 or (num_terms is not None and num_terms < 1):
        raise ValueError(
            f"need 0 ≤ lipschitz_bound < 1, num_probes ≥ 1 and num_terms ≥ 1, got "
            f"{lipschitz_bound}, {num_probes} and {num_terms}"
        )
    records = torch.is_grad_enabled()
    options: dict[str, Any] = {"device": x.device, "generator": generator}
    values: list[Tensor] = []

    def uniform() -> Float[Tensor, "*batch"]:
        return torch.rand(x.shape[:-2], dtype=x.dtype, **options)

    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone() if records else x.detach().clone()
        at = x if x.requires_grad else x.requires_grad_()
        y = f(at)
        for _ in range(num_probes):
            v = torch.randint(0, 2, x.shape, dtype=torch.int8, **options).to(x.dtype) * 2 - 1
            value, inverse = torch.zeros_like(x[..., 0, 0]), v  # Σ_k (−1)ᵏ (Jᵀ)ᵏ v, reweighted
            w, sign = v, 1.0
            for k, weight in enumerate(series(lipschitz_bound, num_terms, uniform), start=1):
                (w,) = torch.autograd.grad(y, at, w, retain_graph=True)  # (Jᵀ)ᵏ v
                value = value + sign * weight / k * (w * v).sum((-2, -1))
                sign = -sign
                inverse = inverse + sign * weight[..., None, None] * w
            if records:  # vᵀ (I + J)⁻¹ J v, held at its value
                (pulled,) = torch.autograd.grad(y, at, inverse, create_graph=True)
                surrogate = (pulled * v).sum((-2, -1))
                value = value + surrogate - surrogate.detach()
            values.append(value)
    found = torch.stack(values)
    error = found.detach().var(0, correction=0).div(num_probes - 1).sqrt()  # 0/0 is NaN
    d, c, n = x.shape[-2] * x.shape[-1], lipschitz_bound, num_terms
    tail = 0.0 if n is None else d * c ** (n + 1) / ((n + 1) * (1 - c)) * (1 + 2.0**-40)
    return LogDetEstimate(found.mean(0), error, tail)


def series(
    c: float, num_terms: int | None, uniform: Callable[[], Float[Tensor, "*batch"]]
) -> Iterator[Float[Tensor, "*batch"]]:
    """The weight of term k = 1, 2, … of every sample: one, or 1/P(n ≥ k) up to a random cut n."""
    weight = torch.ones_like(uniform())
    if num_terms is not None:
        yield from itertools.repeat(weight, num_terms)
        return
    yield weight
    while bool(weight.any()):
        yield weight
        weight = torch.where(uniform() < c, weight / c, 0)
