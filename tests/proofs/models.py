"""Small models of every kind whose texts can be proven."""

from collections.abc import Callable
from typing import Any

import torch

from invformer.nn.transformer import CharTransformer
from tests.support import builders


def unconstrained(name: str, **options: Any) -> CharTransformer:
    """A tiny pre-norm model; of gelu only float64's digits are known."""
    return builders.small_model(name=name, certificate=None, activation="silu", **options)


MODELS: dict[str, Callable[[], CharTransformer]] = {
    "l2": builders.contractive_model,
    "l2 with channel scales": lambda: builders.contractive_model(scaled=True),
    "l2, causal certificate": lambda: builders.contractive_model(certificate="causal"),
    "unit ball": lambda: builders.contractive_model(bounded=True, scaled=True),
    "unit ball, input radius": lambda: builders.contractive_model(bounded=True, input_radius=3.0),
    "strictly causal, kernel 3": builders.model_of_the_past,
    "l2 without a constraint": lambda: unconstrained("l2"),
    "twin": lambda: unconstrained("dot_product", feed_forward_kernel=3),
    "coupling": lambda: unconstrained("reversible"),
}


@torch.enable_grad()
def ready(make: Callable[[], CharTransformer]) -> CharTransformer:
    """A model after a few steps of training."""
    return builders.trained_a_little(make()).eval()
