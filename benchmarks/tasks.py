"""What is timed: one call each, on one batch. A task prepares outside the clock."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Case, windows
from invformer.kernels.cuda_graph import Replayed, with_gradients
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn import CharTransformer, InvertibleStack, certify
from invformer.weights.spectral import normalised, refresh_normalisers, set_manual_refresh

Work = Callable[[], object]
Graphs = Literal["parts", "whole", "none"]
PROMPT = 8
# Characters a generation task adds.
GENERATED = 64


class Training:
    """A training step: forward, backward, clipping, fused AdamW, constants refreshed.

    Args:
        model: what is trained; its constants are refreshed once per step.
        case: sizes.
        precision: float32, or bf16 under autocast.
        probe_length: measure every branch after every step, at so many characters of one window.
        graphs: what is replayed on a GPU as CUDA graphs: passes and constants, each by itself, as
            :class:`.CharLanguageModel` does; the whole step with the optimiser; or nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        precision: str,
        probe_length: int | None = None,
        graphs: Graphs = "parts",
    ) -> None:
        self.model = model.train()
        set_manual_refresh(model)
        self.device = next(model.parameters()).device
        self.inputs, self.targets = windows(case, self.device)
        self.precision = precision
        is_gpu = self.device.type == "cuda"
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, fused=True, capturable=is_gpu and graphs == "whole"
        )
        self.of_batch: Callable[..., Tensor] = self.loss
        self.refresh: Callable[[], None] = partial(refresh_normalisers, model)
        self.step: Callable[[], None] = self.launch
        if is_gpu and graphs == "whole":
            self.step = Replayed(torch.enable_grad()(self.launch))
        elif is_gpu and graphs == "parts":
            with arithmetic(self.device, self.precision):
                self.of_batch = with_gradients(self.loss, model, self.inputs, self.targets)
            self.refresh = Replayed(self.refresh) if normalised(model) else self.refresh
        self.probe = None
        if probe_length is not None:
            assert isinstance(model, CharTransformer)
            text = self.inputs[:1, :probe_length]
            self.probe = LipschitzProbe(model, text, replays=is_gpu)

    def __call__(self) -> None:
        """One step."""
        self.step()
        if self.probe is not None:
            self.probe.values()

    def launch(self) -> None:
        """The step without estimates."""
        self.optimizer.zero_grad(set_to_none=True)
        with arithmetic(self.device, self.precision):
            loss = self.of_batch(self.inputs, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.refresh()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean nats of the batch."""
        folded = {"folded": True} if isinstance(self.model, CharTransformer) else {}
        logits = self.model(inputs, **folded)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Normalisation:
    """What the constraint costs beside the step: Gram iterations, and the weights folded once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        set_manual_refresh(model)

    def __call__(self) -> None:
        """All constants of the model, and every branch's effective weights."""
        refresh_normalisers(self.model)
        with torch.no_grad():
            self.model.weights()


class Evaluation:
    """The code length of one batch, with its weights computed once."""

    def __init__(self, model: nn.Module, case: Case, precision: str) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.inputs, self.targets = windows(case, self.device)
        self.precision = precision

    @torch.no_grad()
    def __call__(self) -> None:
        """Forward, cross-entropy."""
        with arithmetic(self.device, self.precision):
            logits = self.model(self.inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())


class StackForward:
    """One forward pass of the stack, which inversion is counted in."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        assert isinstance(model, CharTransformer)
        self.model = model.eval()
        with torch.no_grad():
            self.x = model.embedding(windows(case, next(model.parameters()).device)[0])

    @torch.no_grad()
    def __call__(self) -> None:
        """x ↦ z."""
        self.model.stack(self.x)


class Inversion:
    """Inputs of the whole stack recovered from its outputs, in float32.

    Args:
        model: a model with an invertible stack.
        case: sizes.
        evidence: measure every layer's residual in float64 and bound the error.
    """

    def __init__(self, model: nn.Module, case: Case, evidence: bool = True) -> None:
        assert isinstance(model, CharTransformer)
        assert isinstance(model.stack, InvertibleStack)
        self.model = model.eval()
        self.stack = model.stack
        self.options = {"evidence": evidence, "throw": False}
        self.certificate = certify(model)
        with torch.no_grad():
            self.z = model.stack(model.embedding(windows(case, next(model.parameters()).device)[0]))

    def __call__(self) -> None:
        """z ↦ x."""
        self.stack.inverse(self.z, certificate=self.certificate, **self.options)


class Generation:
    """Prompts continued by ``GENERATED`` characters each, at once.

    Args:
        model: anything but the plain model.
        case: sizes.
        num_prompts: how many, at most a batch of the case.
    """

    def __init__(self, model: nn.Module, case: Case, num_prompts: int) -> None:
        assert isinstance(model, CharTransformer)
        self.model = model.eval()
        inputs, _ = windows(case, next(model.parameters()).device)
        self.prompts = inputs[:num_prompts, : min(PROMPT, case.seq_len)]

    @torch.no_grad()
    def __call__(self) -> None:
        """Greedy, so that no random numbers are drawn."""
        self.model.generate(self.prompts, GENERATED, temperature=0)


def arithmetic(device: torch.device, precision: str) -> AbstractContextManager:
    """The precision of the forward pass."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
