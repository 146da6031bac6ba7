"""Training language models, if wanted with a penalty on their attention layers, and scoring them.

The penalty sees every attention layer with its input, which is recorded in the forward pass that
the loss needs anyway. The score is nats per character on windows of the validation text, with or
without noise on the embeddings.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor, nn

from invformer.errors import DataError
from invformer.nn.transformer import CharTransformer
from studies import training
from studies.layer_bounds import Layer
from studies.text import Text


def train(
    model: CharTransformer,
    text: Text,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    penalty: Callable[[Layer, Tensor], Tensor] | None = None,
) -> bool:
    """Adam at a constant learning rate on cross-entropy, plus a penalty on every attention layer.

    Args:
        model: in float32; initialised from the first batch.
        text: what to learn.
        num_steps: optimiser steps.
        batch_size: windows per batch.
        lr: learning rate.
        seed: of the order of windows.
        penalty: of an attention layer and its input.

    Returns:
        Whether the loss stayed finite; training stops where it does not.
    """

    def objective(model: CharTransformer, tokens: Tensor, targets: Tensor) -> Tensor:
        with recorded_inputs(model) as inputs:
            loss = training.cross_entropy(model, tokens, targets)
        if penalty is not None:
            loss = loss + sum(penalty(layer, z) for layer, z in inputs)
        return loss

    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    trained = training.train(
        model, text.train, optimiser, num_steps=num_steps, batch_size=batch_size, seed=seed,
        objective=objective,
    )  # fmt: skip
    return trained.finite


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[list[tuple[Layer, Tensor]]]:
    """Every attention layer with its input, in the order of the forward passes inside the block."""
    found: list[tuple[Layer, Tensor]] = []

    def record(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Layer)
        found.append((layer, arguments[0]))

    layers = [module for module in model.modules() if isinstance(module, Layer)]
    handles = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def attention_inputs(
    model: CharTransformer, tokens: Int[Tensor, "sequences tokens"]
) -> list[tuple[Layer, Tensor]]:
    """Every attention layer with its input at some text."""
    with recorded_inputs(model) as inputs:
        model(tokens)
    return inputs


def validation_windows(
    text: Text, seq_len: int, device: torch.device
) -> tuple[Int[Tensor, "windows tokens"], Int[Tensor, "windows tokens"]]:
    """Consecutive full windows of the validation text and the characters that follow each."""
    count = (len(text.val) - 1) // seq_len
    tokens = text.val[: count * seq_len + 1].long().to(device)
    return tokens[:-1].view(count, seq_len), tokens[1:].view(count, seq_len)


def require_windows(text: Text, seq_len: int, count: int, name: str) -> None:
    """The validation text has as many windows as are asked for.

    Raises:
        DataError: it has fewer.
    """
    found = (len(text.val) - 1) // seq_len
    if found < count:
        raise DataError(
            f"{name}: the {len(text.val)} characters of the validation text make {found} windows "
            f"of {seq_len}, {count} are asked for; raise data.val_characters or lower {name}"
        )


def mean_nats(
    model: CharTransformer,
    windows: Int[Tensor, "windows tokens"],
    targets: Int[Tensor, "windows tokens"],
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> float:
    """Nats per character, with Gaussian noise on the embeddings in units of their RMS."""
    total = 0.0
    for tokens, following in zip(windows.split(64), targets.split(64), strict=True):
        x = model.embedding(tokens)
        if noise:
            normal = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            x = x + noise * x.square().mean().sqrt() * normal
        logits = model.predict(model.stack(x))
        total += nn.functional.cross_entropy(
            logits.flatten(0, 1), following.flatten(), reduction="sum"
        ).item()
    return total / targets.numel()
