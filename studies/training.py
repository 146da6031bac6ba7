"""The training loop of the studies that train language models: no callbacks, files or loggers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Integer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from invformer.data.windows import training_windows
from invformer.nn.spectral import refresh_normalisers, set_manual_refresh
from invformer.nn.transformer import CharTransformer
from studies.study import progress

LAST_STEPS = 10  # over which the final training loss is averaged


@dataclass(frozen=True)
class Training:
    """How a training went.

    Attributes:
        losses: of every step taken; the last one is not finite if it was stopped.
        largest_gradient: largest gradient norm over all steps, before clipping.
    """

    losses: list[float]
    largest_gradient: float

    @property
    def finite(self) -> bool:
        """Whether every loss was finite."""
        return all(map(math.isfinite, self.losses))

    @property
    def final_nats(self) -> float:
        """Mean loss of the last steps."""
        return math.fsum(self.losses[-LAST_STEPS:]) / len(self.losses[-LAST_STEPS:])


def cross_entropy(
    model: CharTransformer,
    inputs: Integer[Tensor, "batch seq_len"],
    targets: Integer[Tensor, "batch seq_len"],
) -> Tensor:
    """Mean nats per character of a batch of windows."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(
    model: CharTransformer,
    tokens: Integer[Tensor, "characters"],
    optimiser: Optimizer,
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    schedule: LRScheduler | None = None,
    grad_clip: float | None = None,
    objective: Callable[[CharTransformer, Tensor, Tensor], Tensor] = cross_entropy,
    what: str = "training",
) -> Training:
    """Minimise an objective on the windows of a text, until the steps are done or it is lost.

    Args:
        model: freshly built; initialised from the first batch here.
        tokens: the training text.
        optimiser: of the model's parameters.
        num_steps: optimiser steps.
        batch_size: windows of ``model.seq_len`` per batch.
        seed: of the order of windows.
        schedule: of the learning rate, moved once per step; None keeps it constant.
        grad_clip: largest gradient norm; None leaves gradients alone.
        objective: what is minimised, from model, inputs and targets.
        what: words for the progress bar.

    Returns:
        Losses and gradients; training stops at a loss that is not finite.
    """
    set_manual_refresh(model)
    device = model.head.weight.device
    losses: list[float] = []
    largest = 0.0
    model.train()
    for step in progress(range(num_steps), what):
        batch = training_windows(tokens, model.seq_len, batch_size, seed, step)
        inputs, targets = (part.to(device) for part in batch)
        if step == 0:
            model.initialise(inputs)
        loss = objective(model, inputs, targets)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimiser.zero_grad()
        loss.backward()
        with_gradient = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
        largest = max(largest, norm.item())
        if grad_clip is not None:
            nn.utils.clip_grads_with_norm_(with_gradient, grad_clip, norm)
        optimiser.step()
        if schedule is not None:
            schedule.step()
        refresh_normalisers(model)
    set_manual_refresh(model, False)
    return Training(losses, largest)
