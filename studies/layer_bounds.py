"""Upper bounds on the Jacobian of one attention layer at its input, beside the true norm.

A layer is taken apart into heads (differentiably, so that a bound can also be trained), the local
bounds of its kind are evaluated, and power iteration gives the truth; all in ``frobenius``.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.heads import InputMaps, OutputMaps
from invformer.branches.tied_l2 import local_bounds as local
from invformer.branches.tied_l2.attention import TiedL2Attention
from invformer.kernels.attention import only
from invformer.lipschitz.power_iteration import operator_norm
from invformer.numerics.l2_attention import PerHead, attention_weights, merge_heads, split_heads
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.numerics.norms import Tokens
from invformer.numerics.spectral_norm import spectral_norm_bound
from studies import castin, jasmin

Layer = DotProductAttention | TiedL2Attention
OfSequences = Float[Tensor, "*batch"]

STEPS = 300
RTOL = 1e-6  # the value's relative error is of the order of its square


class Heads(NamedTuple):
    """Weights and activations of one attention layer, per head (of an L2 layer, k = v = q).

    F(X) = Σ_h P^h v^h W_o^h with P^h = softmax(logits of q^h and k^h).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor


def heads_of(layer: Layer, z: Tokens) -> Heads:
    """What a layer computes at its input, head by head; differentiable."""
    bias = layer.position(z.shape[-2]).to(z.dtype)
    if isinstance(layer, TiedL2Attention):
        w_q, g = layer.weights()
        q = project(z, w_q)
        return Heads(q, q, q, attention_weights(q, bias), w_q, w_q, w_q, g)
    w_q, w_k, w_v = (
        part.unflatten(0, (layer.num_heads, -1)).mT for part in layer.qkv.weight.chunk(3)
    )
    w_o = layer.out.weight.mT.unflatten(0, (layer.num_heads, -1))
    q, k, v = (project(z, w) for w in (w_q, w_k, w_v))
    p = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)
    return Heads(q, k, v, p, w_q, w_k, w_v, w_o)


def l2_terms(heads: Heads) -> tuple[OfSequences, OfSequences]:
    """The query and key terms of (P^h q^h)_h of tied L2 attention from above, with s = √d.

    query = (2/s) max_i (Σ_h ‖W_h C_i^h‖_F²)^½
    key   = (2/s) max_j (Σ_h Σ_i P_ij^h ‖C_i^h‖_F ‖W_h(q_j − q_i)‖²)^½

    Both vanish where the attention weights do not react to the input. Differentiable.
    """
    q = heads.q - heads.q[..., :1, :]
    c = local.covariance(heads.p, q, q)  # C_i, (*batch, H, N, d, d)
    query = torch.linalg.matrix_norm(heads.w_q.unsqueeze(-3) @ c).square()
    z = q @ heads.w_q.mT
    square = z.square().sum(-1)
    distance = square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * z @ z.mT
    key = heads.p * torch.linalg.matrix_norm(c).unsqueeze(-1) * distance.clamp_min(0)
    tiny = torch.finfo(q.dtype).tiny  # the square root is then differentiable at zero
    squares = query.sum(-2), key.sum((-3, -2))
    query, key = (s.amax(-1).clamp_min(tiny).sqrt() * (2 / math.sqrt(q.shape[-1])) for s in squares)
    return query, key


def dot_product_terms(
    heads: Heads, slack: Float[Tensor, "*batch heads 1"] | float = 0.0
) -> tuple[OfSequences, OfSequences]:
    """The same of (P^h v^h)_h of dot-product attention; ``slack`` is the rounding of a moment.

    query = (1/s) max_i (Σ_h ‖Cov_i(v, k) W_qᵀ‖_F²)^½
    key   = (1/s) max_j (Σ_h Σ_i P_ij tr Cov_i(v) ‖W_k q_i‖²)^½
    """
    q, k, v, p = heads[:4]
    s = math.sqrt(q.shape[-1])
    query = torch.linalg.matrix_norm(local.covariance(p, v, k) @ heads.w_q.mT.unsqueeze(-3))
    query = (query + slack * torch.linalg.matrix_norm(heads.w_q)[:, None]).square()
    variance = (p @ v.square() - (p @ v).square()).sum(-1).clamp_min(0) + slack
    pull = (q @ heads.w_k.mT).square().sum(-1)
    key = (p.mT @ (variance * pull).unsqueeze(-1)).squeeze(-1)
    tiny = torch.finfo(q.dtype).tiny
    query, key = (t.sum(-2).amax(-1).clamp_min(tiny).sqrt() / s for t in (query, key))
    return query, key


def sensitivity_regulariser(layer: Layer, z: Tokens) -> Float[Tensor, ""]:
    """Mean query and key terms of the layer's ``fast`` local bound; differentiable.

    Small iff the attention weights hardly react to the input. It follows the true size of that
    reaction (rank correlation 0.97; JaSMin_0: 0.18) because it sees lengths and weights too (ours).
    """
    terms = l2_terms if isinstance(layer, TiedL2Attention) else dot_product_terms
    query, key = terms(heads_of(layer, z))
    return (query + key).mean()


def compare(layer: Layer, z: Tokens) -> tuple[list[float], dict[str, list[float]]]:
    """The true ‖∂F/∂X‖ of a layer at its input, and local bounds, in ``frobenius`` by sequence.

    ``tight`` and ``fast`` are ours, ``g1`` is Theorem 3 of Yudin et al. 2025.
    """
    truth = operator_norm(jacobian_of(layer, z), "frobenius", num_steps=STEPS, rtol=RTOL)
    heads = heads_of(layer, z)
    if isinstance(layer, TiedL2Attention):
        parts = heads.q, heads.p, heads.w_q, heads.w_o
        bounds = {"tight": local.tight_local_bound(*parts), "fast": local.fast_local_bound(*parts)}
    else:
        a = heads.w_q @ heads.w_k.mT / math.sqrt(heads.q.shape[-1])
        g1 = castin.multi_head_bound(heads.w_o.mT, jasmin.attention_bound(z, heads.p, a, heads.w_v))
        bounds = {"fast": dot_product_local_bound(heads), "g1": g1}
    return truth.value.tolist(), {name: bound.tolist() for name, bound in bounds.items()}


def jacobian_of(layer: Layer, z: Tokens) -> LinearMap:
    """The Jacobian of a layer."""
    with only("math"):  # fused attention has no second derivative
        return linearise(layer, z)


def tied_attention(x: Tokens, w_q: InputMaps, g: OutputMaps) -> Tokens:
    """f(X)_i = Σ_h (P^h q^h)_i G_h, every token sees all."""
    q = project(x, w_q)
    return merge_heads(attention_weights(q) @ q) @ g.flatten(-3, -2)


def project(x: Tokens, w: InputMaps) -> PerHead:
    """x W_h for every head: (*batch, N, D) → (*batch, H, N, d)."""
    return split_heads(x @ merge_heads(w), w.shape[-3])


def dot_product_local_bound(heads: Heads) -> OfSequences:
    """‖J‖ in frobenius of Σ_h softmax(q kᵀ/s + b_h) v W_o, from above.

    ‖W_o‖ (‖[W_v]‖ max_h (max_j Σ_i P_ij)^½ + query + key), see :func:`dot_product_terms`: the three
    terms of :func:`.tied_l2.local_bounds.fast_local_bound`. No global bound stands above it:
    dot-product attention is not Lipschitz. The Jacobian is Castin, Ablin & Peyré 2024, arXiv
    2312.14820, Lemma C.2.
    """
    exact = Heads(*(part.double() for part in heads))
    k, v = (x - x[..., :1, :] for x in (exact.k, exact.v))  # a common offset would cancel badly
    exact = exact._replace(k=k, v=v, p=local.row_normalised(exact.p))
    slack = torch.maximum(local.rounding(k), local.rounding(v))
    value = spectral_norm_bound(merge_heads(exact.w_v)) * exact.p.sum(-2).amax((-2, -1)).sqrt()
    terms = value + sum(dot_product_terms(exact, slack))
    return local.outward(spectral_norm_bound(exact.w_o.flatten(0, 1)) * terms, heads.q)
