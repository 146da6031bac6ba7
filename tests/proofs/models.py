"""Small models of every kind whose texts can be proven."""

from collections.abc import Callable
from typing import Any

import torch

from invformer.nn.transformer import CharTransformer
from tests.support.builders import (
    contractive_model,
    model_of_the_past,
    small_model,
    trained_a_little,
)


def unconstrained(name: str, **options: Any) -> CharTransformer:
    """A tiny pre-norm model; of gelu only float64's digits are known."""
    return small_model(name=name, certificate=None, activation="silu", **options)


MODELS: dict[str, Callable[[], CharTransformer]] = {
    "l2": contractive_model,
    "l2 with channel scales": lambda: contractive_model(scaled=True),
    "l2, causal certificate": lambda: contractive_model(certificate="causal"),
    "unit ball": lambda: contractive_model(bounded=True, scaled=True),
    "unit ball, input radius": lambda: contractive_model(bounded=True, input_radius=3.0),
    "strictly causal, kernel 3": model_of_the_past,
    "l2 without a constraint": lambda: unconstrained("l2"),
    "twin": lambda: unconstrained("dot_product", feed_forward_kernel=3),
    "coupling": lambda: unconstrained("reversible"),
}


@torch.enable_grad()
def ready(make: Callable[[], CharTransformer]) -> CharTransformer:
    """A model after a few steps of training."""
    return trained_a_little(make()).eval()
