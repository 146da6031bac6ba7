"""Bits per character, summed in float64."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric


class BitsPerChar(Metric):
    """Mean code length of a text in bits per character: Σ nats / (ln 2 · number of characters).

    Sums are float64 and counts int64, so the value does not drift with the length of the text; both
    add up across processes. Call ``set_dtype(torch.float64)`` after casting a module that holds it.
    """

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    characters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("characters", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nats: Float[Tensor, "..."], num_characters: int | Tensor) -> None:
        """Add the summed negative log-likelihood of ``num_characters`` characters.

        Args:
            nats: Σ −ln p over those characters (any shape; it is summed).
            num_characters: how many there were.
        """
        self.nats += nats.double().sum()
        self.characters += num_characters

    def compute(self) -> Tensor:
        """Bits per character of everything seen."""
        # A count times a number would be of the default type, hence rounded to single precision.
        return self.nats / self.characters / math.log(2)
