"""Tied L2 self-attention, and the kind of it that contracts by construction.

Notation: X ∈ R^{N×D}, rows are tokens; H heads of d = D/H channels; q^h = X W^Q_h ∈ R^{N×d}.

    F(X) = Σ_h (P^h q^h) G_h,   P^h_ij = softmax_j(−‖q^h_i − q^h_j‖²/√d + b_h(i − j))

Because W^K = W^Q, the value path P X A_h W^V_h W^O_h with A_h = W^Q_h W^Q_hᵀ/√d (Kim et al. 2021)
is a function of q alone: (P q)(W^Q_hᵀ W^V_h W^O_h)/√d = (P q) G_h, with the output map G_h.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from invformer.branches import compiled
from invformer.branches.branch import AttentionCache, LipschitzBranch, cast, weights_together
from invformer.branches.compiled import Fields
from invformer.branches.heads import AttentionCertificate, InputMaps, OutputMaps, head_width
from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2.enclosed import EnclosedL2Attention
from invformer.branches.tied_l2.jacobian import StackedL2Attention
from invformer.kernels.attention import Kernel, attend_l2
from invformer.numerics import l2_attention as core
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.lambert_w import causal_gain_from_log, phi_inverse_from_log
from invformer.numerics.norms import Norm, Tokens, unknown_norm
from invformer.numerics.residual_equation import Kind
from invformer.weights.affine import affine
from invformer.weights.position_bias import VisibilityMask, log_masses
from invformer.weights.scaling import ScalingWeights
from invformer.weights.spectral import (
    INITIAL_OUTPUT,
    SpectralNormalised,
    normalised_weights,
    sigmas,
    write_to,
)


class L2Weights(NamedTuple):
    """W^Q, in the memory of one (D, H d) matrix, and G."""

    w_q: InputMaps
    g: OutputMaps


class TiedL2Attention(LipschitzBranch[L2Weights]):
    """f(X)_i = Σ_h (P^h q^h)_i G_h for any G_h; subclasses differ in their weights.

    Every token sees itself, and queries are the keys: otherwise f is not Lipschitz
    (docs/numerics.md §2).
    """

    position: VisibilityMask
    kernel: Kernel = "auto"
    stacked = StackedL2Attention

    def forward(
        self, x: Tokens, weights: L2Weights | None = None, centre: Tensor | None = None
    ) -> Tokens:
        """Σ_h (P^h q^h) G_h with q^h = X W^Q_h.

        A ``centre`` m is added to X: m = D⁻¹ b if a scaling D x + b is folded into the weights.
        """
        w_q, g = weights or self.weights()
        # Queries, which are the keys and the values as well; one matrix for all heads.
        q = affine(x, merge_heads(w_q), centre=centre)  # (*batch, N, H d)
        q = split_heads(q, len(w_q))  # (*batch, H, N, d)
        # Σ_j P_ij q_j,  P_ij = softmax_j(−‖q_i − q_j‖²/√d + b(i − j)). Fused kernels never hold the
        # squared distances of all pairs at once (on a CPU kernels/cpp/attention.cpp).
        y = attend_l2(q, self.position.logit_bias(x.shape[-2]), self.kernel)  # (*batch, H, N, d)
        return merge_heads(y) @ g.flatten(-3, -2)  # (*batch, N, D)

    def next_outputs(
        self, x: Tokens, past: AttentionCache, weights: L2Weights | None = None
    ) -> Tokens:
        """As :meth:`.Branch.next_outputs`, from the keys of the tokens in ``past``."""
        w_q, g = weights or self.weights()
        q = split_heads(x @ merge_heads(w_q), len(w_q))
        if past.origin is None:  # distances ignore a shift, rows of P sum to one: less rounding
            past.origin = q[..., :1, :]
        q = q - past.origin
        (keys,) = past.append(core.with_lengths(q))
        bias = self.position.last_rows(q.shape[-2], keys.shape[-2])
        p = core.row_weights(q, keys, bias)
        y = (p @ keys[..., :-1]).to(q.dtype) + past.origin
        return merge_heads(y) @ g.flatten(-3, -2)

    @staticmethod
    def bounds_of(
        branches: Sequence["TiedL2Attention"],
        norm: Norm,
        kind: Kind,
        dtype: torch.dtype | None,
        weights: Sequence[L2Weights],
    ) -> list[float]:
        """Bounds by :mod:`.tied_l2.bounds`, for sequences of ``seq_len`` tokens."""
        w_q, g = (cast(w, dtype) for w in weights_together(weights))
        positions = [branch.position for branch in branches]
        # log n of every head and row
        per_row = torch.stack([position.log_mass_per_row() for position in positions]).cpu()
        log_mass = per_row.amax(-1)
        if kind == "causal":
            for position in positions:
                position.require_causal()
            # A Lipschitz constant bounds the diagonal blocks too.
            lipschitz = contractive.token_max_bounds(w_q, g, log_mass)
            return list(map(min, contractive.causal_bounds(w_q, g, log_mass), lipschitz))
        match norm:
            case "token_max":
                return contractive.token_max_bounds(w_q, g, log_mass)
            case "frobenius":
                return contractive.frobenius_bounds(w_q, g, per_row)
            case "entry_max":
                return contractive.entry_max_bounds(w_q, g, log_mass)
        raise unknown_norm(norm)

    def enclosed(self, weights: L2Weights | None, length: int) -> EnclosedL2Attention:
        """As :meth:`.Branch.enclosed`."""
        return EnclosedL2Attention(*(weights or self.weights()), self.position, length)

    def compiled_fields(self, weights: L2Weights) -> Fields:
        """As :meth:`.Branch.compiled_fields`."""
        own = compiled.maps(*StackedL2Attention.maps(weights)) | {"is_tied": True}
        return own | compiled.heads(len(weights.g), self.position)


class ContractiveL2Attention(TiedL2Attention):
    """f(X)_i = (c/√H) Σ_h (P^h q^h)_i Ĝ_h / (κ_h σ_h),  σ_h ≥ ‖W^Q_h‖₂.

    Ĝ = W^G/σ̄(W^G) is a matrix of norm ≤ 1 that has the Ĝ_h one above the other.

    ``token_max``: κ_h = 4 φ⁻¹(n_h) + 1 bounds one head's gain, so Lip(f) ≤ c in max_i ‖x_i‖₂.
    ``causal``: κ′_h = 1 + 2 W₀(n_h e^{−3/2}) replaces κ_h, and the diagonal Jacobian blocks are at
    most c; that is enough to invert a causal block, but Lip(f) may exceed c (docs/numerics.md has
    both proofs).

    Ĝ_h stands for the product W^Q_hᵀ W^V_h W^O_h, and is learned as one matrix.

    Args:
        d_model: width D.
        num_heads: H, a divisor of D.
        position: causal mask or relative position bias; its mass n_h enters κ_h.
        lipschitz_target: c in (0, 1).
        certificate: which of the two constants is held at c.
        output_channels: channels the output map writes to at initialisation (None: all).
        kernel: implementation of the attention (:mod:`invformer.kernels.attention`).
        initial_output: size of the output map's entries at initialisation.
    """

    is_proven = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        position: VisibilityMask,
        lipschitz_target: float,
        certificate: AttentionCertificate = "token_max",
        output_channels: slice | None = None,
        kernel: Kernel = "auto",
        initial_output: float = INITIAL_OUTPUT,
    ) -> None:
        super().__init__(lipschitz_target)
        self.kernel = kernel
        self.position = position
        self.certificate: AttentionCertificate = certificate
        d_head = head_width(d_model, num_heads)
        w_q = 0.3 * torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model)
        self.w_q = SpectralNormalised(w_q)
        w_g = initial_output * torch.randn(d_model, d_model)
        self.w_g = SpectralNormalised(write_to(w_g, output_channels))

    @property
    def folds_scaling(self) -> bool:
        """True."""
        return True

    def group(self) -> Hashable:
        """Shape, certificate, and type and length of the mask."""
        mask = type(self.position), self.position.seq_len
        return type(self), self.w_q.weight.shape, self.certificate, mask

    @staticmethod
    def weights_of(
        branches: Sequence["ContractiveL2Attention"], scalings: ScalingWeights | None = None
    ) -> list[L2Weights]:
        """W^Q and G_h = (c/√H) Ĝ_h / (κ_h σ_h) of each; with scalings D W^Q and G_h D⁻¹."""
        num_heads, _, d_head = branches[0].w_q.weight.shape  # L branches of H heads together
        log_mass = log_masses([b.position for b in branches])  # log n, (L, H) or (L, 1)
        log_mass = log_mass.to(branches[0].w_q.weight)
        if branches[0].certificate == "causal":
            kappa = causal_gain_from_log(log_mass)  # κ′ = 1 + 2 W₀(n e^{−3/2})
        else:
            kappa = 4 * phi_inverse_from_log(log_mass) + 1  # κ = 4 φ⁻¹(n) + 1
        scale = torch.stack([b.target_scale() for b in branches]) / math.sqrt(num_heads)  # (L,)
        w_q = torch.stack([b.w_q.weight for b in branches])  # (L, H, D, d)
        sigma = sigmas([b.w_q for b in branches], w_q)  # (L, H)
        per_head = scale[:, None] / (kappa * sigma)  # c/(√H κ_h σ_h), (L, H)
        g = normalised_weights(  # Ĝ per_head D⁻¹, with the Ĝ_h one above the other: (H d, D)
            [b.w_g for b in branches],
            per_head.repeat_interleave(d_head, dim=-1)[..., None],  # (L, H d, 1)
            None if scalings is None else scalings.inverse[:, None, :],
        )
        if scalings is not None:
            w_q = w_q * scalings.scale[:, None, :, None]
        return list(map(L2Weights, in_one_matrix(w_q), g.unflatten(1, (num_heads, d_head))))


def in_one_matrix(w: InputMaps) -> InputMaps:
    """The same weights, of several layers perhaps, in the memory of one (D, H d) matrix each."""
    return split_heads(merge_heads(w), w.shape[-3])
