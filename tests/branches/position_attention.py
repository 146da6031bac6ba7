"""An attention that the program does not know: the example of CONTRIBUTING.md, to copy."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from invformer.branches.branch import LipschitzBranch, cast
from invformer.branches.enclosed import EnclosedBranch, NotEnclosed, weight
from invformer.branches.jacobian import Chosen, Measured, Products, StackedBranches, take
from invformer.numerics.enclosure import Enclosure, Matrix
from invformer.numerics.norms import Norm
from invformer.numerics.pairs import Pair, paired
from invformer.numerics.spectral_norm import spectral_norm_bound
from invformer.weights.position_bias import VisibilityMask
from invformer.weights.spectral import SpectralNormalised

# Covers the rounding of sums and products in float64.
ROUNDING = 1 + 2.0**-40


class PositionWeights(NamedTuple):
    """P as (N, N), and G as (D, D)."""

    p: Tensor
    g: Tensor


class StackedPositionAttention(StackedBranches):
    """Several such attentions: rows J_i· = [P_ij G]_j of their Jacobians, and local bounds."""

    def matrices(self) -> tuple[Tensor, Tensor]:
        """P of the tokens there are, (branches, N, N), and G."""
        p, g = (torch.stack(each) for each in zip(*self.weights, strict=True))
        return p[:, : self.num_tokens, : self.num_tokens], g

    def products(self, chosen: Chosen, is_own: Tensor) -> Products:
        """dX ↦ Σ_j P_ij dx_j G, and its adjoint, of R output tokens i.

        dX is (branches, R, N, D), or (branches, R, 1, D) of token i alone; what comes out is
        (branches, R, D). ``chosen``, (branches, sequences, K), are the tokens i, R = sequences · K;
        ``is_own``, (branches, R, N, 1), is one where j = i.
        """
        p, g = self.matrices()
        p = take(p.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1), chosen)
        p = p.flatten(1, 2).unsqueeze(-1)  # (branches, R, tokens, 1)
        in_ball = self.derivative_in_ball(chosen)
        return Products(
            lambda dx: (p * in_ball(dx)).sum(2) @ g,
            lambda dy: in_ball(p * (dy @ g.mT).unsqueeze(2)),
        )

    def local_bounds(self, measured: Measured, tight: bool = False) -> Tensor:
        """‖G‖₂ times the largest row sum of P, or its largest P_ii for diagonal blocks: exact."""
        if measured not in ("token_max", "diagonal_block"):
            return super().local_bounds(measured)
        p, g = (w.double() for w in self.matrices())
        rows = p.sum(-1) if measured == "token_max" else p.diagonal(dim1=-2, dim2=-1)
        return spectral_norm_bound(g) * rows.amax(-1) * ROUNDING


class EnclosedPositionAttention(EnclosedBranch):
    """P X G in enclosures: what is written is P X, of the text before each row and of itself."""

    def __init__(self, p: Tensor, g: Tensor) -> None:
        if p.triu(1).any():
            raise NotEnclosed("tokens see later ones, so that a beginning has no states of its own")
        super().__init__([torch.eye(len(g), dtype=g.dtype, device=g.device)], g)
        self.before, self.own = weight(p.tril(-1)), weight(p.diagonal()[:, None])

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """Σ_{j<i} P_ij x_j + P_ii x_i, and the text.

        z are the rows X W, (rows, D), for every W that the class reads (here one, the identity);
        ``places`` are their positions, ``past`` is what the call for the text gave; None for it.
        """
        (own,) = z
        text = own if past is None else past
        p = paired(self.before) if isinstance(own, Pair) else self.before
        before = p[places, : len(text.middle)].matmul(Matrix(text))
        return before + own * self.own[places], text


class PositionAttention(LipschitzBranch[PositionWeights]):
    """f(X) = P X G with P = mean_h softmax_j b_h(i − j) and ‖G‖₂ ≤ c: tokens are not compared.

    Rows of P are ≥ 0 and sum to one, so ‖(P X G)_i‖₂ ≤ max_j ‖x_j‖₂ ‖G‖₂: Lip(f) ≤ c in token_max.
    """

    is_proven = True
    stacked = StackedPositionAttention

    def __init__(self, d_model: int, position: VisibilityMask, lipschitz_target: float) -> None:
        super().__init__(lipschitz_target)
        self.position = position
        self.w_g = SpectralNormalised(torch.randn(d_model, d_model) / math.sqrt(d_model))

    def weights(self) -> PositionWeights:
        """P at full length and G = c Ĝ."""
        p = self.position(self.position.seq_len).softmax(-1).mean(0)
        return PositionWeights(p, self.w_g() * self.target_scale())

    def forward(self, x: Tensor, weights: PositionWeights | None = None) -> Tensor:
        """P X G, of the first tokens if X is shorter; a later column is zero in their rows."""
        p, g = weights or self.weights()
        n = x.shape[-2]
        return p[:n, :n] @ x @ g

    def lipschitz_bound(
        self, norm: Norm, dtype: torch.dtype | None = None, weights: PositionWeights | None = None
    ) -> float:
        """‖G‖₂ times the largest row sum of P, which rounding may have made more than one."""
        if norm != "token_max":
            raise ValueError(f"no bound of this attention is known in {norm}")
        p, g = (cast(w, dtype).double() for w in weights or self.weights())
        return (spectral_norm_bound(g) * p.sum(-1).max() * ROUNDING).item()

    def enclosed(self, weights: PositionWeights, length: int) -> EnclosedPositionAttention:
        """As :meth:`.Branch.enclosed`."""
        return EnclosedPositionAttention(weights.p[:length, :length], weights.g)
