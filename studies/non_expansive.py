"""Feed-forward layers that bring no two tokens farther apart, for the constant of a whole network.

    y = x + f(x),   f(x) = −c Ŵ φ(Ŵᵀ x + b),   ‖Ŵ‖₂ ≤ 1,   φ = ReLU

f is the gradient of a concave function. Its Jacobian −c Ŵ S Ŵᵀ, 0 ≤ S ≤ I, is symmetric and has
eigenvalues in [−c, 0], so those of the layer's Jacobian lie in [1 − c, 1]: its Lipschitz constant
is at most 1, in token_max and frobenius. For a layer with any other branch of constant c only the
bound 1 + c is known.

Source: Meunier et al. 2022 (arXiv 2110.12690), with c = 2, the largest for which this holds. Here
c < 1, so that the layer can be inverted.
"""

from collections.abc import Sequence

import torch

from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward, FeedForwardWeights
from invformer.weights.scaling import ScalingWeights
from invformer.weights.spectral import normalised_weights


class GradientFeedForward(ContractiveFeedForward):
    """f(x) = −c Ŵ φ(Ŵᵀ x + b).

    Args:
        d_model: width D.
        d_ff: number of hidden units; twice those of another feed-forward make as many parameters.
        lipschitz_target: c in (0, 1).
    """

    is_proven = True

    def __init__(self, d_model: int, d_ff: int, lipschitz_target: float) -> None:
        super().__init__(d_model, d_ff, lipschitz_target, activation="relu")
        del self.w_out, self.log_sharpness  # ReLU has the same shape at every sharpness

    @property
    def folds_scaling(self) -> bool:
        """False: one matrix stands on both sides."""
        return False

    @staticmethod
    def weights_of(
        branches: Sequence[ContractiveFeedForward], scalings: ScalingWeights | None = None
    ) -> list[FeedForwardWeights]:
        """Ŵ, b and −c Ŵᵀ of each."""
        b_in = torch.stack([b.b_in for b in branches])
        w_in = normalised_weights([b.w_in for b in branches], b_in.new_ones(1, 1, 1))
        w_out = -torch.stack([b.target_scale() for b in branches])[:, None, None] * w_in.mT
        return list(map(FeedForwardWeights, w_in, b_in, w_out, torch.ones_like(b_in)))
