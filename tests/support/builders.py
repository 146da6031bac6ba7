"""Small models for tests."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from invformer.assemble.model import build_invertible_stack, build_model, build_pre_norm_stack
from invformer.config.load import load_config
from invformer.config.schema import ModelConfig
from invformer.nn import CausalMask, RelativePositionBias, VisibilityMask
from invformer.nn.transformer import CharEmbedding, CharTransformer
from invformer.weights.spectral import set_manual_refresh

VOCAB, SEQ_LEN, WIDTH, HEADS, LAYERS = 11, 12, 12, 3, 2


def small_model(**options: Any) -> CharTransformer:
    """A tiny model of these options; the numbers of its stack are drawn first."""
    size = {"d_model": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "d_ff": 2 * WIDTH}
    config = ModelConfig(**size, **options)
    build_stack = build_invertible_stack if config.is_contractive else build_pre_norm_stack
    stack, width = build_stack(config, SEQ_LEN), WIDTH * (2 if config.name == "reversible" else 1)
    channels = config.embedding_width * width // WIDTH
    return CharTransformer(CharEmbedding(VOCAB, SEQ_LEN, width, channels), stack, VOCAB, width)


def contractive_model(
    target: float = 0.7,
    certificate: Any = "token_max",
    norm: bool = True,
    bounded: bool = False,
    kernel: int = 1,
    input_radius: float | None = None,
    scaled: bool = False,
    **options: Any,
) -> CharTransformer:
    """A tiny contractive model with injective padding, initialised on random tokens."""
    model = small_model(
        name="contractive_bounded" if bounded else "contractive_l2", certificate=certificate,
        lipschitz_target=target, d_head=2 if bounded else None, feed_forward_kernel=kernel,
        activation_norm=norm and not scaled, diagonal_scaling=scaled,
        input_radius=None if input_radius is None else input_radius / math.sqrt(WIDTH), **options,
    )  # fmt: skip
    model.initialise(random_tokens(8))
    return model


def preset_model(preset: str, num_layers: int) -> CharTransformer:
    """A small model of a preset, for estimates during training."""
    words = [f"model={preset}", "model.d_model=32", f"model.num_layers={num_layers}"]
    model = build_model(load_config(words).model, VOCAB, SEQ_LEN)
    model.initialise(random_tokens(1))
    set_manual_refresh(model)
    return model


def model_of_the_past() -> CharTransformer:
    """Strictly causal attention in the unit ball, hidden units that see three tokens."""
    return contractive_model(0.7, "causal", bounded=True, strictly_causal=True, kernel=3)


def scaled_model(
    target: float = 0.5,
    certificate: str = "causal",
    bounded: bool = True,
    strictly_causal: bool = True,
    **options,
) -> CharTransformer:
    """Every branch contracts in a weighted norm of its own."""
    options |= {"bounded": bounded, "strictly_causal": strictly_causal, "scaled": True}
    return contractive_model(target, certificate, **options)


def baseline(name: Any = "dot_product", kernel: int = 1) -> CharTransformer:
    """A tiny pre-norm baseline."""
    plain = {"certificate": None, "activation": "gelu", "feed_forward_kernel": kernel}
    return small_model(name=name, **plain)


# Additive couplings, two streams of the baseline's width.
coupling = partial(baseline, "reversible")
# The baseline with tied L2 attention, and the one with hidden units that see three tokens.
l2_baseline, convolutional_baseline = partial(baseline, "l2"), partial(baseline, kernel=3)


def mask_of(kind: str, heads: int, tokens: int) -> VisibilityMask:
    """A bias of the lag, with or without the token itself; a causal mask; or none."""
    match kind:
        case "bias" | "strict":
            return RelativePositionBias(heads, tokens, sees_itself=kind == "bias")
        case "causal":
            return CausalMask(tokens)
    return VisibilityMask(torch.ones(tokens, tokens, dtype=torch.bool))


@torch.no_grad()
def moved(layer: torch.nn.Module) -> Any:
    """The layer with no parameter at its start value."""
    for parameter in layer.parameters():
        parameter += 0.5 * torch.randn_like(parameter) * parameter.abs().mean()
    return layer.requires_grad_(False).eval()


def random_tokens(batch: int, seed: int = 0) -> torch.Tensor:
    """Random symbols, (batch, SEQ_LEN)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (batch, SEQ_LEN), generator=generator)


def trained_a_little(model: CharTransformer, steps: int = 4) -> CharTransformer:
    """The model after a few AdamW steps on random text, so that nothing is at its start value."""
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(steps))
    return model.eval()


def train(model: CharTransformer, optimiser: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps on random text, each on its own."""
    for step in steps:
        tokens = random_tokens(4, seed=step)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
