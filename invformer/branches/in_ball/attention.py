"""Attention of queries, keys and values in the unit ball, contractive by construction."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches import compiled
from invformer.branches.branch import AttentionCache, LipschitzBranch, cast, weights_together
from invformer.branches.compiled import Fields
from invformer.branches.enclosed import EnclosedDotProducts, weight
from invformer.branches.heads import AttentionCertificate
from invformer.branches.in_ball import bounds as bounded
from invformer.branches.in_ball.jacobian import StackedBoundedAttention
from invformer.kernels.attention import Kernel, attend_in_ball
from invformer.numerics.ball import into_ball
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.norms import Norm, Tokens
from invformer.numerics.pairs import paired
from invformer.numerics.residual_equation import Kind
from invformer.numerics.token_shift import delay
from invformer.weights.affine import affine
from invformer.weights.position_bias import VisibilityMask
from invformer.weights.scaling import ScalingWeights
from invformer.weights.spectral import (
    INITIAL_OUTPUT,
    SpectralNormalised,
    normalised_weights,
    write_to,
)

# β and τ at initialisation; both are learned per head.
INITIAL_SHARPNESS = 0.5
INITIAL_TEMPERATURE = 2.0


class BoundedWeights(NamedTuple):
    """The weights of Σ_h P^h v^h G_h with q, k, v = ψ(X W), every constant multiplied in.

    Attributes:
        w_qkv: W_Q, W_K, W_V as (3, H, D, d), in the memory of one (D, 3 H d) matrix.
        temperature: τ as (H,).
        g: G as (H, d, D).
    """

    w_qkv: Tensor
    temperature: Tensor
    g: Tensor


class BoundedAttention(LipschitzBranch[BoundedWeights]):
    """f(X) = (c/ν) Σ_h (P^h v^h) Ĝ_h / L_h,  P^h = softmax(τ_h q^h·k^h + b_h), untied.

    q, k, v = ψ(β Ŵ X) with ψ(z) = z/√(1 + ‖z‖²), the map into the unit ball, and ‖Ĝ‖₂ ≤ 1. Dot
    products make attention non-Lipschitz (Kim et al. 2021, Theorem 3.1); in a ball they do not. The
    constant depends neither on the length nor on the position bias. Queries, keys and values have
    separate matrices, and a token need not see itself.

    ``token_max``: Lip(f) ≤ c in max_i ‖x_i‖₂, by ‖Ŵ_h‖₂ ≤ 1 of every head, ν = √H and
    L_h = √(β_V² + τ² max(β_Q, β_K)²).
    ``causal``: ‖∂f_i/∂x_i‖₂ ≤ c, by ‖[Ŵ_h]_h‖₂ ≤ 1 of all heads together,
    L_h = √(β_V² + τ²β_Q² + τ²β_K²/4) and ν ≤ √3 (ν = 1 if all heads are alike). This is enough to
    invert a causal block; Lip(f) may exceed c. Both theorems are in ``branches/in_ball/bounds.py``.

    If the attention is strictly causal, a token sees the tokens before it, and a null token
    (k = v = 0) before the first, but not itself. Then ∂f_i/∂x_i depends on the query alone: under
    ``causal`` L_h = τ β_Q and ν = 1.

    The other arguments are those of :class:`.ContractiveL2Attention`.

    Args:
        d_head: channels of a head, d; H d may be another number than D.
        strictly_causal: True if tokens see only the tokens before them; lag 0 of ``position`` is
            then the token before.
    """

    is_proven = True
    stacked = StackedBoundedAttention

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_head: int,
        position: VisibilityMask,
        lipschitz_target: float,
        certificate: AttentionCertificate = "token_max",
        output_channels: slice | None = None,
        kernel: Kernel = "auto",
        initial_output: float = INITIAL_OUTPUT,
        strictly_causal: bool = False,
    ) -> None:
        super().__init__(lipschitz_target)
        self.position = position
        self.kernel: Kernel = kernel
        self.num_heads = num_heads
        self.certificate: AttentionCertificate = certificate
        self.strictly_causal = strictly_causal
        joined = certificate == "causal"
        shape = (3, 1, d_model, num_heads * d_head) if joined else (3, num_heads, d_model, d_head)
        self.w_qkv = SpectralNormalised(torch.randn(shape) / math.sqrt(d_model))
        w_g = initial_output * torch.randn(num_heads * d_head, d_model)
        self.w_g = SpectralNormalised(write_to(w_g, output_channels))
        self.log_sharpness = nn.Parameter(torch.full((3, num_heads), math.log(INITIAL_SHARPNESS)))
        self.log_temperature = nn.Parameter(torch.full((num_heads,), math.log(INITIAL_TEMPERATURE)))

    def group(self) -> Hashable:
        """Shape, certificate, strict causality, and type and length of the mask."""
        mask = type(self.position), self.position.seq_len
        shape = self.w_qkv.weight.shape, self.num_heads
        return type(self), shape, self.certificate, self.strictly_causal, mask

    @staticmethod
    def weights_of(
        branches: Sequence["BoundedAttention"], scalings: ScalingWeights | None = None
    ) -> list[BoundedWeights]:
        """β Ŵ, τ and G_h = (c/n) Ĝ_h / L_h of each; with scalings β D Ŵ and G_h D⁻¹."""
        first = branches[0]
        num_heads, d_head = first.num_heads, first.w_g.weight.shape[0] // first.num_heads
        sharpness = torch.stack([b.log_sharpness for b in branches]).exp()
        temperature = torch.stack([b.log_temperature for b in branches]).exp()
        gain = composed_gain(sharpness, temperature, first.certificate, first.strictly_causal)
        scale = torch.stack([b.target_scale() for b in branches])[:, None]
        scale = (scale / gain).repeat_interleave(d_head, dim=-1)
        rows = None if scalings is None else scalings.scale[:, None, None, :, None]
        columns = None if scalings is None else scalings.inverse[:, None, :]
        factors = sharpness[..., None, None]  # by head, or by column of all heads together
        if first.certificate == "causal":
            factors = sharpness.repeat_interleave(d_head, dim=-1)[:, :, None, None, :]
        w_qkv = normalised_weights([b.w_qkv for b in branches], factors, rows)
        w_qkv = split_heads(merge_heads(w_qkv.flatten(1, 2)), 3 * num_heads).unflatten(1, (3, -1))
        w_g = normalised_weights([b.w_g for b in branches], scale[..., None], columns)
        return list(map(BoundedWeights, w_qkv, temperature, w_g.unflatten(1, (num_heads, d_head))))

    def forward(
        self, x: Tokens, weights: BoundedWeights | None = None, centre: Tensor | None = None
    ) -> Tokens:
        """Σ_h P^h v^h G_h, of X + m with a centre m."""
        weights = weights or self.weights()
        # Queries, keys and values of all heads, z = (X + m) W
        w = merge_heads(weights.w_qkv.flatten(0, 1))  # (D, 3 H d)
        z = affine(x, w, centre=centre)  # (*batch, N, 3 H d)
        bias = self.position.logit_bias(x.shape[-2])
        # softmax_j(τ q_i·k_j + b(i − j)) v_j for q, k, v = ψ(z), ‖·‖₂ < 1
        tau = weights.temperature
        y = attend_in_ball(z, tau, bias, self.strictly_causal, self.kernel)  # (*batch, H, N, d)
        return merge_heads(y) @ weights.g.flatten(-3, -2)  # (*batch, N, D)

    def next_outputs(
        self, x: Tokens, past: AttentionCache, weights: BoundedWeights | None = None
    ) -> Tokens:
        """As :meth:`.Branch.next_outputs`, from keys and values in ``past``."""
        weights = weights or self.weights()
        q, k, v = self.in_ball(x, weights)
        k, v = past.append(k, v)
        if self.strictly_causal:
            k, v = delay(k), delay(v)
        bias = self.position.last_rows(x.shape[-2], k.shape[-2]).to(q)
        logits = (q * weights.temperature[:, None, None].to(q)) @ k.mT + bias
        return merge_heads(logits.softmax(-1) @ v) @ weights.g.flatten(-3, -2)

    @property
    def folds_scaling(self) -> bool:
        """True."""
        return True

    def enclosed(self, weights: BoundedWeights, length: int) -> EnclosedDotProducts:
        """As :meth:`.Branch.enclosed`."""
        return EnclosedDotProducts(
            [merge_heads(w) for w in weights.w_qkv],
            paired(weight(weights.temperature)),
            self.position,
            weights.g.flatten(-3, -2),
            length,
            in_ball=True,
            strictly_causal=self.strictly_causal,
        )

    def compiled_fields(self, weights: BoundedWeights) -> Fields:
        """As :meth:`.Branch.compiled_fields`."""
        own = compiled.maps(*StackedBoundedAttention.maps(weights))
        own |= compiled.heads(self.num_heads, self.position)
        own["temperatures"] = weights.temperature
        return own | {"strictly_causal": self.strictly_causal}

    def in_ball(self, x: Tokens, weights: BoundedWeights) -> tuple[Tensor, ...]:
        """Queries, keys and values ψ(X W), each (*batch, H, N, d), each token's own."""
        z = affine(x, merge_heads(weights.w_qkv.flatten(0, 1)))  # (*batch, N, 3 H d)
        return into_ball(split_heads(z, 3 * self.num_heads), 1.0).chunk(3, dim=-3)

    @staticmethod
    def bounds_of(
        branches: Sequence["BoundedAttention"],
        norm: Norm,
        kind: Kind,
        dtype: torch.dtype | None,
        weights: Sequence[BoundedWeights],
    ) -> list[float]:
        """Bounds by :mod:`.in_ball.bounds`, for sequences of ``seq_len`` tokens."""
        used, first = as_used(weights_together(weights), dtype), branches[0]
        if kind == "global":
            return bounded.lipschitz_bounds(*used, norm, first.position.seq_len)
        for branch in branches:
            branch.position.require_causal()
        sharpness = torch.stack([b.log_sharpness for b in branches]).exp()
        temperature = torch.stack([b.log_temperature for b in branches]).exp()
        parts = diagonal_block_parts(sharpness, temperature, first.strictly_causal)
        gains = torch.linalg.vector_norm(parts, dim=-2).tolist()
        return bounded.causal_bounds(*used, gains, first.strictly_causal)


def as_used(weights: BoundedWeights, dtype: torch.dtype | None) -> BoundedWeights:
    """The weights as a forward pass in ``dtype`` rounds them; τ as the larger of two roundings.

    Kernels divide logits by √d, so that q is multiplied by τ√d, rounded; single rows by τ.
    """
    w_qkv, temperature, g = (cast(w, dtype) for w in weights)
    root = math.sqrt(w_qkv.shape[-1])
    in_kernels = cast(weights.temperature * root, dtype).double() * ((1 + 2.0**-50) / root)
    return BoundedWeights(w_qkv, torch.maximum(temperature.double(), in_kernels), g)


def composed_gain(
    sharpness: Float[Tensor, "*layers three heads"],
    temperature: Float[Tensor, "*layers heads"],
    certificate: AttentionCertificate,
    strictly_causal: bool,
) -> Float[Tensor, "*layers heads"]:
    """ν L_h for β and τ: the output map of head h is divided by it."""
    if certificate == "token_max":
        query, key, value = sharpness.unbind(-2)
        gain = torch.hypot(value, temperature * torch.maximum(query, key))
        return math.sqrt(gain.shape[-1]) * gain
    parts = diagonal_block_parts(sharpness, temperature, strictly_causal)
    gain = torch.linalg.vector_norm(parts, dim=-2, keepdim=True)
    shares = parts / gain
    return gain.squeeze(-2) * shares.square().amax(-1).sum(-1).sqrt().unsqueeze(-1)


def diagonal_block_parts(
    sharpness: Tensor, temperature: Tensor, strictly_causal: bool
) -> Float[Tensor, "*layers parts heads"]:
    """τ β_Q, τ β_K/2 and β_V: how a token acts on its row by its query, its key and its value.

    L_h is their Euclidean norm. A token that does not see itself acts by its query alone.
    """
    query, key, value = sharpness.unbind(-2)
    if strictly_causal:
        return (temperature * query).unsqueeze(-2)
    return torch.stack([temperature * query, temperature * key / 2, value], dim=-2)
