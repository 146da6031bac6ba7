"""Inputs with known answers, and the naive attention maps that serve as oracles.

The maps are loops over heads and tokens that touch visible tokens only, so that their dense
Jacobians (reverse-mode autodiff of the loop) share no code and no derivation with what they test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from invformer.numerics.norms import Norm


@dataclass(frozen=True)
class AttentionProblem:
    """An L2 attention map at one point."""

    x: Tensor  # tokens, (N, D)
    w_q: Tensor  # (H, D, d)
    g: Tensor  # output maps G_h, (H, d, D)
    bias: Tensor  # (H, N, N), −inf where hidden, zero on the diagonal

    def map(self, x: Tensor) -> Tensor:
        return l2_attention(x, self.w_q, self.g, self.bias)

    def log_mass_per_row(self) -> Tensor:
        """log Σ_{j ≠ i} e^{b_ij}, (H, N)."""
        itself = torch.eye(self.bias.shape[-1], dtype=torch.bool)
        return self.bias.masked_fill(itself, -math.inf).logsumexp(-1)

    def log_mass(self) -> Tensor:
        return self.log_mass_per_row().amax(-1)

    def jacobian(self) -> Tensor:
        return jacobian(self.map, self.x)

    def last_row(self) -> Tensor:
        """The last token's rows of the Jacobian, (1, D, N, D), cheap for many tokens."""
        last = len(self.x) - 1
        return jacobian(
            lambda x: l2_attention_row(x, last, self.w_q, self.g, self.bias)[None], self.x
        )


def attended(i: int, values: Tensor, q: Tensor, bias: Tensor) -> Tensor:
    """Σ_j softmax_j(−‖q_i − q_j‖²/√d + b_ij) v_j over visible j of one head."""
    visible = bias[i] > -math.inf
    gaps = (q[i] - q[visible]).square().sum(-1) / math.sqrt(q.shape[-1])
    return (bias[i, visible] - gaps).softmax(-1) @ values[visible]


def l2_attention_row(x: Tensor, i: int, w_q: Tensor, g: Tensor, bias: Tensor) -> Tensor:
    """F(X)_i = Σ_h Σ_j P_ij q_j G_h, written out."""
    heads = zip((x @ w for w in w_q), g, bias, strict=True)
    return torch.stack([attended(i, q, q, b) @ w for q, w, b in heads]).sum(0)


def l2_attention(x: Tensor, w_q: Tensor, g: Tensor, bias: Tensor) -> Tensor:
    return torch.stack([l2_attention_row(x, i, w_q, g, bias) for i in range(len(x))])


def paper_attention(x: Tensor, w_q: Tensor, w_v: Tensor, w_o: Tensor, bias: Tensor) -> Tensor:
    """[P^h X A_h W^V_h]_h W^O with A_h = W^Q_h W^Q_hᵀ/√d, as printed."""
    heads = []
    for w, v, b in zip(w_q, w_v, bias, strict=True):
        values = x @ (w @ w.T / math.sqrt(w.shape[-1])) @ v
        heads.append(torch.stack([attended(i, values, x @ w, b) for i in range(len(x))]))
    return torch.cat(heads, -1) @ w_o


def attend_in_ball(
    x: Tensor, w_qkv: Tensor, tau: Tensor, g: Tensor, bias: Tensor, strict: bool
) -> Tensor:
    """Σ_h P_h v_h G_h, written out; strictly causal, keys and values come a token later."""
    y = torch.zeros(len(x), g.shape[-1])
    for h, w in enumerate(w_qkv.unbind(1)):
        q, k, v = (z / (1 + z.square().sum(-1, keepdim=True)).sqrt() for z in x @ w)
        if strict:
            k, v = (torch.cat([torch.zeros_like(z[:1]), z[:-1]]) for z in (k, v))
        y = y + (tau[h] * q @ k.T + bias[h % len(bias)]).softmax(-1) @ v @ g[h]
    return y


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f_i/∂x_j as (N, D, N, D), rows by reverse mode."""
    return torch.func.jacrev(f)(x)


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The same as an ND × ND matrix, ordered as x.flatten()."""
    return jacobian(f, x).reshape(x.numel(), x.numel())


def norm_from_below(jac: Tensor, norm: Norm) -> float:
    """The operator norm of a dense Jacobian: exact, except in token_max, where it is a lower bound.

    In token_max: for every row i, maximise ‖Σ_j J_ij x_j‖ over unit x_j by alternating between the
    x_j and the unit vector that reads the output, from the leading left singular vector and three
    random ones, until no norm grows any more.
    """
    if norm == "frobenius":
        return torch.linalg.matrix_norm(jac.flatten(2).flatten(0, 1), 2).item()
    if norm == "entry_max":
        return jac.abs().sum((-2, -1)).max().item()
    rows = jac.flatten(2)  # (N, D, N D)
    out = torch.randn(4, *jac.shape[:2], generator=torch.Generator().manual_seed(0)).to(jac)
    out[0] = torch.linalg.svd(rows, full_matrices=False).U[..., 0]
    out, norms = out.transpose(0, 1), torch.zeros(len(jac), 4)
    for _ in range(200):
        pulled = torch.nn.functional.normalize(out, dim=-1) @ rows
        x = torch.nn.functional.normalize(pulled.unflatten(-1, jac.shape[2:]), dim=-1)
        out = x.flatten(-2) @ rows.mT
        before, norms = norms, torch.linalg.vector_norm(out, dim=-1)
        if (norms <= (1 + 1e-12) * before).all():
            break
    return norms.max().item()


def of_one_layer(bounds: Callable[..., list[Any]], *arguments: Any, **options: Any) -> Any:
    """What a function of several layers says of one layer; tensors and lists are of that layer."""
    several = [x[None] if isinstance(x, Tensor) else x for x in arguments]
    (bound,) = bounds(*([x] if isinstance(x, list) else x for x in several), **options)
    return bound


def diagonal_norm(jac: Tensor) -> float:
    """max_i ‖∂f_i/∂x_i‖₂."""
    blocks = jac.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return torch.linalg.matrix_norm(blocks, 2).max().item()


def two_headed_problem(others: int) -> tuple[AttentionProblem, float]:
    """Two heads at their witness at once, each on its half of the tokens, writing one channel.

    Head h sees the last token and the tokens of group h only, placed at ±r along channel h.

    Returns:
        The problem, and its gain: both heads' tokens move freely, the query's move is shared.
    """
    n = others // 2
    gap = best_two_sided_gap(n)
    group = torch.arange(others + 1) % 2
    sides = torch.ones(others + 1)
    sides[2::4] = sides[3::4] = -1
    sides[-1] = 0
    x = math.sqrt(gap) * sides[:, None] * torch.nn.functional.one_hot(group, 2)
    bias = torch.zeros(2, others + 1, others + 1)
    for h in range(2):
        bias[h, :, group != h] = -math.inf
        bias[h].fill_diagonal_(0)
    g = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    p = n * math.exp(-gap) / (1 + n * math.exp(-gap))
    gain = 2 * p * (2 * gap - 1) + math.sqrt(2) * (1 - p + 2 * p * gap)
    return AttentionProblem(x, torch.eye(2)[:, :, None], g, bias), gain


def plain_bias(num_heads: int, num_tokens: int, causal: bool) -> Tensor:
    """No preference; under a causal mask later tokens are hidden."""
    bias = torch.zeros(num_heads, num_tokens, num_tokens)
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return bias.masked_fill(hidden, -math.inf) if causal else bias


def random_problem(
    seed: int,
    num_heads: int,
    d_head: int,
    num_tokens: int,
    causal: bool,
    query_scale: float = 1.0,
    spread: float = 1.0,
    bias_scale: float = 0.0,
    clusters: int = 0,
) -> AttentionProblem:
    """Gaussian weights and tokens; or tokens in a few tight clusters, with flat softmax rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = num_heads * d_head
    x = spread * normal(num_tokens, width)
    if clusters:
        centres = spread * normal(clusters, width)
        x = centres[torch.arange(num_tokens) % clusters] + 1e-3 * normal(num_tokens, width)
    by_lag = bias_scale * normal(num_heads, 2 * num_tokens - 1)
    by_lag[:, num_tokens - 1] = 0
    position = torch.arange(num_tokens)
    lag = position[:, None] - position[None, :]
    return AttentionProblem(
        x=x,
        w_q=query_scale * normal(num_heads, width, d_head) / math.sqrt(width),
        g=normal(num_heads, d_head, width) / math.sqrt(width),
        bias=by_lag[:, lag + num_tokens - 1] + plain_bias(num_heads, num_tokens, causal),
    )


def two_sided_problem(
    num_tokens: int, gap: float, num_heads: int = 1, d_head: int = 1, bias: float = 0.0
) -> AttentionProblem:
    """The witness: last token at 0, half of the others at +r, half at −r, s = r²‖W^Q‖²/√d = gap.

    N is odd. All along the leading direction of the first head's W^Q; the other heads write
    nothing. With p = n e^{−s}/(1 + n e^{−s}), n = (N − 1) e^bias, Y = 0 by symmetry and in the last
    row

        ‖B_ii‖ = 1 − p + 2ps,     Σ_{j ≠ i} ‖B_ij‖ = p |2s − 1|     (times ‖W^Q‖ and ‖G‖)

    so the gain is 1 − 2p + 4ps for s ≥ 1/2. At s = 1 + g(n), p = g/(1 + g): 4g + 1 − 2g/(1 + g).
    """
    generator = torch.Generator().manual_seed(7)
    width = num_heads * d_head
    w_q = torch.randn(num_heads, width, d_head, generator=generator)
    g = torch.zeros(num_heads, d_head, width)
    left, sigma, right = torch.linalg.svd(w_q[0], full_matrices=False)
    g[0] = torch.randn(d_head, width, generator=generator)
    # Align: the leading output of W^Q is the leading input of G.
    _, values, v = torch.linalg.svd(g[0], full_matrices=False)
    g[0] = right.T @ torch.diag(values) @ v
    r = math.sqrt(gap * math.sqrt(d_head)) / sigma[0].item()
    sides = torch.ones(num_tokens)
    sides[1::2] = -1
    sides[-1] = 0
    relative = torch.full((num_tokens, num_tokens), bias).fill_diagonal_(0)
    return AttentionProblem(
        x=r * sides[:, None] * left[:, 0],
        w_q=w_q,
        g=g,
        bias=relative + plain_bias(num_heads, num_tokens, causal=True),
    )


def two_sided_gain(n: float, gap: float) -> float:
    """1 − 2p + 4ps, the last row's gain in :func:`two_sided_problem` at unit norms (s ≥ 1/2)."""
    p = n * math.exp(-gap) / (1 + n * math.exp(-gap))
    return 1 - 2 * p + 4 * p * gap


def best_two_sided_gap(n: float) -> float:
    """The s that maximises :func:`two_sided_gain`, to four digits."""
    gaps = torch.linspace(0.5, 5 + math.log(1 + n), 50_001).tolist()
    return max(gaps, key=partial(two_sided_gain, n))


def matrix_with(singular_values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix with the given min(rows, columns) singular values in random directions."""
    generator = torch.Generator().manual_seed(seed)
    size = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, size, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, size, generator=generator)).Q
    return u * singular_values @ v.T


def trained_like(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Noise plus a few strong directions: the shape of spectrum that training leaves."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, columns, generator=generator) / math.sqrt(rows)
    strong = torch.zeros(min(rows, columns))
    strong[:6] = torch.tensor([5.0, 4.4, 4.0, 3.7, 3.5, 3.4])
    return noise + matrix_with(strong, rows, columns, seed + 1)


# Random attention maps over several orders of magnitude of everything that enters the bounds.
attention_problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**31),
    num_heads=st.integers(1, 3),
    d_head=st.integers(1, 3),
    num_tokens=st.integers(1, 7),
    causal=st.booleans(),
    query_scale=st.sampled_from([0.03, 0.3, 1.0, 3.0, 30.0]),
    spread=st.sampled_from([0.01, 0.3, 1.0, 3.0, 100.0]),
    bias_scale=st.sampled_from([0.0, 1.0, 4.0]),
    clusters=st.sampled_from([0, 0, 2, 3]),
)
