"""Code length of a text under the model: the whole split, each character once, context declared."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn import functional as F

from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import at_least_single

LN2 = math.log(2)
Window = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Likelihood:
    """How well a text is predicted."""

    bpc: float  # bits per character: mean −log₂ p
    num_characters: int  # scored: every character of the split, once

    @property
    def nats(self) -> float:
        """Mean −ln p per character."""
        return self.bpc * LN2


def window_nats(
    logits: Float[Tensor, "batch tokens vocab"],
    targets: Integer[Tensor, "batch tokens"],
    scored: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, ""]:
    """Σ −ln p of the characters of a window batch that are scored there, in float64."""
    logits = at_least_single(logits).flatten(0, 1)
    nats = F.cross_entropy(logits, targets.flatten(), reduction="none")
    return (nats.double() * scored.flatten()).sum()


@torch.no_grad()
def score(model: CharTransformer, windows: Iterable[Window], device: torch.device) -> Likelihood:
    """Bits per character of a split, from (inputs, targets, scored) batches of windows.

    They score every character once, except the first, which no context predicts: it costs ln V.
    """
    # torchmetrics takes a second, and programs that score nothing import this module
    from invformer.evaluation.bits_per_character import BitsPerCharacter

    metric = BitsPerCharacter().to(device)
    metric.update(math.log(model.head.out_features), 1)
    weights = model.weights()
    for inputs, targets, scored in windows:
        scored = scored.to(device)
        nats = window_nats(model(inputs.to(device), weights), targets.to(device), scored)
        metric.update(nats, scored.sum())
    return Likelihood(metric.compute().item(), int(metric.count))
