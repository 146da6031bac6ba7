"""CUDA graphs of what every step and every validation batch repeat."""

from typing import Any

import torch
from torch import Tensor

from invformer.kernels.cuda_graph import Replayed, with_gradients
from invformer.weights.spectral import normalised


class StepGraphs:
    """Calls a module's ``loss``, ``refresh`` and ``code_length``, where it can by replaying graphs.

    Graphs are recorded at their first calls, and forgotten by :meth:`forget`, because they read the
    memory that parameters had then.

    Args:
        module: the training module, with its ``model``, ``trainer`` and ``device``.
        wanted: False never replays.
    """

    def __init__(self, module: Any, wanted: bool) -> None:
        self.module, self.wanted = module, wanted
        self.forget()

    def forget(self) -> None:
        """Give the memory of graphs back, and record anew at the next calls."""
        self._loss: Any = None
        self._refresh = Replayed(self.module.refresh)
        self.has_normalised = bool(normalised(self.module.model))  # else there is nothing to record
        self._validation: dict[torch.Size, Replayed] = {}

    @property
    def replays(self) -> bool:
        """True on one GPU, if a step is one batch whose activations are kept."""
        module = self.module
        if not self.wanted or module.device.type != "cuda":
            return False
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        recomputes = getattr(module.model.stack, "checkpoint_activations", False)
        return alone and not recomputes and module.trainer.accumulate_grad_batches == 1

    def loss(self, *arguments: Tensor) -> Tensor:
        """The loss of a batch, with its gradients."""
        if not self.replays:
            return self.module.loss(*arguments)
        if self._loss is None:
            self._loss = with_gradients(self.module.loss, self.module.model, *arguments)
        return self._loss(*arguments)

    def refresh(self) -> None:
        """Compute every σ̄ of the present weights."""
        (self._refresh if self.has_normalised and self.replays else self.module.refresh)()

    def code_length(self, inputs: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        """Nats and number of the scored characters of a batch; the last one may be smaller."""
        of_batch = self.module.code_length
        if self.replays:
            of_batch = self._validation.setdefault(inputs.shape, Replayed(of_batch))
        return of_batch(inputs, *others)
