"""The L2 attentions of Kim et al. 2021: unscaled (a baseline), and contractive as published."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.branches.heads import head_width
from invformer.branches.tied_l2.attention import L2Weights, TiedL2Attention, in_one_matrix
from invformer.kernels.attention import Kernel
from invformer.numerics.lambert_w import phi_inverse_from_log
from invformer.numerics.precision import without_autocast
from invformer.weights.position_bias import VisibilityMask
from invformer.weights.scaling import ScalingWeights
from invformer.weights.spectral import SpectralNormalised, least_norm, max_row_sum

PaperCertificate = Literal["kim_entry_max", "kim_frobenius"]


class L2Attention(TiedL2Attention):
    """Tied L2 multi-head attention (Kim et al. 2021, §3.2), Lipschitz but not scaled.

    G_h = W^Q_hᵀ W^V_h W^O_h / √d, so W^K = W^Q and the factor A_h are there by construction.

    The arguments are those of :class:`.ContractiveL2Attention`.
    """

    is_proven = True

    def __init__(
        self, d_model: int, num_heads: int, position: VisibilityMask, kernel: Kernel = "auto"
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.position = position
        d_head = head_width(d_model, num_heads)
        self.w_q = nn.Parameter(torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model))
        self.w_v = nn.Parameter(torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model))
        self.w_o = nn.Parameter(torch.randn(num_heads, d_head, d_model) / math.sqrt(d_model))

    @staticmethod
    def weights_of(
        branches: Sequence["L2Attention"], scalings: ScalingWeights | None = None
    ) -> list[L2Weights]:
        """W^Q, and G_h = W^Q_hᵀ W^V_h W^O_h / √d, of each."""
        of_each = ((b.w_q, b.w_v, b.w_o) for b in branches)
        w_q, w_v, w_o = map(torch.stack, zip(*of_each, strict=True))
        return list(map(L2Weights, in_one_matrix(w_q), paper_output_map(w_q, w_v, w_o)))


class PaperContractiveL2Attention(TiedL2Attention):
    """c F(X) / Lip(F): Contractive-L2-MHA as published (Kim et al. 2021, §4), with W^V and W^O.

    ``kim_entry_max`` divides by Theorem 3.2's bound in the norm max |X_ik|, ``kim_frobenius`` by
    its bound in ‖X‖_F with the exponent 4 on ‖W^Q_h‖ (2, as often reproduced, cannot hold).
    Gradients flow through numerator and denominator, as in the paper. The arguments are those of
    :class:`.ContractiveL2Attention`.
    """

    is_proven = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        position: VisibilityMask,
        lipschitz_target: float,
        certificate: PaperCertificate = "kim_entry_max",
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__(lipschitz_target)
        self.kernel = kernel
        self.position = position
        self.certificate = certificate
        d_head = head_width(d_model, num_heads)
        shape = (num_heads, d_model, d_head)
        self.w_q = SpectralNormalised(torch.randn(shape) / math.sqrt(d_model))
        self.w_v = SpectralNormalised(torch.randn(shape) / math.sqrt(d_model))
        self.w_o = SpectralNormalised(torch.randn(d_model, d_model) / math.sqrt(d_model))

    def weights(self) -> L2Weights:
        """W^Q, and G_h = c W^Q_hᵀ W^V_h W^O_h / (√d Lip(F))."""
        w_q, w_v = self.w_q.weight, self.w_v.weight
        w_o = self.w_o.weight.unflatten(0, (w_q.shape[0], w_q.shape[2]))
        bound = self.published_bound()
        scale = self.target_scale() / bound.clamp_min(least_norm(bound.dtype))
        return L2Weights(in_one_matrix(w_q), paper_output_map(w_q, w_v, w_o) * scale)

    def published_bound(self) -> Float[Tensor, ""]:
        """Theorem 3.2 on the present weights, differentiable; float rounding is left to certify."""
        d_head = self.w_q.weight.shape[-1]
        u = phi_inverse_from_log(self.position.log_mass().to(self.w_q.weight)).max()
        if self.certificate == "kim_frobenius":
            per_head = torch.linalg.vector_norm(self.w_q.sigma() ** 2 * self.w_v.sigma())
            tokens = math.sqrt(self.position.seq_len / d_head)
            return tokens * (4 * u + 1) * per_head * self.w_o.sigma()
        w_q, w_v, w_o = self.w_q.weight, self.w_v.weight, self.w_o.weight
        query = (max_row_sum(w_q) * max_row_sum(w_q.mT)).amax()
        value = max_row_sum(w_v.mT).amax()
        return (4 * u + 1 / math.sqrt(d_head)) * max_row_sum(w_o.mT) * query * value


def paper_output_map(w_q: Tensor, w_v: Tensor, w_o: Tensor) -> Float[Tensor, "heads d_head width"]:
    """G_h = W^Q_hᵀ W^V_h W^O_h / √d: the value path of the paper with its factor A_h.

    In the precision of the weights, also under autocast: it is G_h that certificates cast.
    """
    with without_autocast(w_q.device):
        return w_q.mT @ w_v @ w_o / math.sqrt(w_q.shape[-1])
