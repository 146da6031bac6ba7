"""An exponential moving average of the weights, kept beside those that learn."""

from typing import Any

import torch
from torch import nn

from invformer.numerics.private import foreach_lerp_
from invformer.runs.checkpoint import LEARNING, PREFIX
from invformer.weights.spectral import refresh_normalisers


class WeightAverage:
    """w̄ ← w̄ + (1 − δ_t)(w − w̄) after every step, δ_t = min(δ, (t + 1)/(t + 10)).

    Early on δ_t is small, so that the average forgets the initialisation (as in TensorFlow's
    ``ExponentialMovingAverage``). Buffers are not averaged: they are functions of the weights.
    :meth:`use` exchanges both sets of weights, so that validation, certificate and inversion are of
    the average.

    The average starts as the model's parameters are. Without a decay there is none, and nothing is
    done.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        kept = {} if decay is None else self.parameters
        self.kept = {name: p.detach().clone() for name, p in kept.items()}
        self.in_use = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's present parameters."""
        return dict(self.model.named_parameters())

    def follow(self) -> None:
        """Keep the average where, and in the precision that, the weights now are."""
        parameters = self.parameters
        self.kept = {name: kept.to(parameters[name]) for name, kept in self.kept.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after optimiser step ``step``, counted from zero."""
        if self.decay is None:
            return
        decay = min(self.decay, (step + 1) / (step + 10))
        learning = self.parameters
        kept = [self.kept[name] for name in learning]
        foreach_lerp_(kept, list(learning.values()), 1 - decay)

    @torch.no_grad()
    def use(self, wanted: bool) -> None:
        """Put the average into the model, or the weights that learn."""
        if self.decay is None or self.in_use == wanted:
            return
        for name, parameter in self.parameters.items():
            before = parameter.detach().clone()
            parameter.copy_(self.kept[name])
            self.kept[name].copy_(before)
        self.in_use = wanted
        refresh_normalisers(self.model)

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Make the average a checkpoint's weights, and keep those that learn beside them."""
        if self.decay is None:
            return
        current = {name: p.detach() for name, p in self.parameters.items()}
        average, learning = (current, self.kept) if self.in_use else (self.kept, current)
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = weights | {PREFIX + name: w for name, w in average.items()}
        checkpoint[LEARNING] = {name: w.clone() for name, w in learning.items()}

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """The inverse of :meth:`put_into`: the checkpoint's weights are then those that learn."""
        if self.decay is None:
            return
        average = checkpoint["state_dict"]
        self.kept = {name: average[PREFIX + name] for name in self.parameters}
        self.in_use = False
        learning = {PREFIX + name: checkpoint[LEARNING][name] for name in self.parameters}
        checkpoint["state_dict"] = average | learning
