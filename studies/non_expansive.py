"""Feed-forward layers that bring no two tokens farther apart, for the constant of a whole network.

    y = x + f(x),   f(x) = −c Ŵ φ_β(Ŵᵀ x + b),   ‖Ŵ‖₂ ≤ 1,   φ = ReLU

f is the gradient of a concave function: its Jacobian −c Ŵ S Ŵᵀ, 0 ≤ S ≤ I, is symmetric and has
eigenvalues in [−c, 0]. Those of the layer's lie in [1 − c, 1], so its Lipschitz constant is 1. Of
the layer of another branch of constant c only 1 + c is known.

Source: Meunier et al. 2022 (arXiv 2110.12690), whose c may be 2. Here c < 1, so that the layer can
be inverted.
"""

from collections.abc import Sequence

from invformer.nn.feed_forward import ContractiveFeedForward, FeedForwardWeights
from invformer.nn.scaling import ScalingWeights


class GradientFeedForward(ContractiveFeedForward):
    """f(x) = −c Ŵ φ_β(Ŵᵀ x + b).

    Args:
        d_model: width D.
        d_ff: number of hidden units; twice those of another feed-forward make as many parameters.
        lipschitz_target: c in (0, 1).
    """

    is_proven = True

    def __init__(self, d_model: int, d_ff: int, lipschitz_target: float) -> None:
        super().__init__(d_model, d_ff, lipschitz_target, activation="relu")
        self.folds_scaling = False
        del self.w_out

    @staticmethod
    def weights_of(
        branches: Sequence["GradientFeedForward"], scalings: ScalingWeights | None = None
    ) -> list[FeedForwardWeights]:
        """Ŵβ, bβ, −c Ŵᵀ/β and β of each."""
        found = []
        for branch in branches:
            w, sharpness = branch.w_in(), branch.log_sharpness.exp()
            w_out = -branch.target_scale() * (w / sharpness).mT
            found.append(
                FeedForwardWeights(w * sharpness, branch.b_in * sharpness, w_out, sharpness)
            )
        return found
