"""The state of a branch between two calls that each add tokens to a text."""

from jaxtyping import Float
from torch import Tensor


class AttentionCache:
    """Tensors a branch keeps of up to ``capacity`` tokens, for the outputs of later ones.

    An attention keeps keys and values, L2 attention one tensor for both, a feed-forward over
    several tokens the tokens themselves.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        # Subtracted from every key, if keys are kept relative to the first token's.
        self.origin: Tensor | None = None
        self._kept: list[Tensor] = []

    def append(
        self, *new: Float[Tensor, "*batch new channels"]
    ) -> list[Float[Tensor, "*batch tokens channels"]]:
        """Add some tokens; returns the tensors of all tokens so far, as views."""
        if not self._kept:
            self._kept = [x.new_empty(*x.shape[:-2], self.capacity, x.shape[-1]) for x in new]
        end = self.length + new[0].shape[-2]
        for kept, x in zip(self._kept, new, strict=True):
            kept[..., self.length : end, :] = x
        self.length = end
        return [kept[..., :end, :] for kept in self._kept]
