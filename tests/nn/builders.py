"""Small models for tests."""

from collections.abc import Iterable
from typing import Any

import torch

from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.nn import (
    BoundedAttention,
    CausalMask,
    ContractiveFeedForward,
    ContractiveL2Attention,
    CouplingBlock,
    CouplingStack,
    DiagonalScaling,
    DotProductAttention,
    FeedForward,
    InvertibleBlock,
    InvertibleStack,
    L2Attention,
    RelativePositionBias,
    VisibilityMask,
    written_channels,
)
from invformer.nn.spectral import set_manual_refresh
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack

VOCAB, SEQ_LEN, WIDTH, HEADS, LAYERS = 11, 12, 12, 3, 2


def contractive_model(
    target: float = 0.7,
    certificate: str = "token_max",
    norm: bool = True,
    bounded: bool = False,
    strictly_causal: bool = False,
    kernel: int = 1,
    input_radius: float | None = None,
    scaled: bool = False,
) -> CharTransformer:
    """A tiny contractive model with injective padding, initialised on random tokens."""
    d_embedding = WIDTH // 3
    share = (WIDTH - d_embedding) // LAYERS
    blocks = []
    for index in range(LAYERS):
        first = d_embedding + index * share
        channels = None if scaled else slice(first, first + share)
        position = RelativePositionBias(HEADS, SEQ_LEN, sees_itself=not strictly_causal)
        if bounded:
            how = {"output_channels": channels, "strictly_causal": strictly_causal}
            attention = BoundedAttention(WIDTH, HEADS, 2, position, target, certificate, **how)
        else:
            attention = ContractiveL2Attention(
                WIDTH, HEADS, position, target, certificate, channels
            )
        feed_forward = ContractiveFeedForward(
            WIDTH, 2 * WIDTH, target, "silu", output_channels=channels, kernel=kernel
        )
        scalings = (None, None)
        if scaled:
            scalings = tuple(DiagonalScaling(WIDTH, c) for c in written_channels(WIDTH, index))
        d_norm = WIDTH if norm and not scaled else None
        blocks.append(InvertibleBlock(attention, feed_forward, d_norm, input_radius, scalings))
    kind = "causal" if certificate == "causal" else "global"
    stack = InvertibleStack(blocks, SEQ_LEN, "token_max", kind)
    model = CharTransformer(CharEmbedding(VOCAB, SEQ_LEN, WIDTH, d_embedding), stack, VOCAB, WIDTH)
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


def baseline(
    attention: type = DotProductAttention,
    dropout: float = 0.0,
    kernel: int = 1,
    block: type[PreNormBlock] = PreNormBlock,
    stack: type[PreNormStack] = PreNormStack,
    streams: int = 1,
) -> CharTransformer:
    """A tiny pre-norm baseline."""
    blocks = []
    for _ in range(LAYERS):
        attends = attention(WIDTH, HEADS, RelativePositionBias(HEADS, SEQ_LEN))
        feeds = FeedForward(WIDTH, 2 * WIDTH, kernel=kernel)
        blocks.append(block(attends, feeds, WIDTH, dropout))
    width = streams * WIDTH
    embedding = CharEmbedding(VOCAB, SEQ_LEN, width, width)
    return CharTransformer(embedding, stack(blocks), VOCAB, width)


def coupling() -> CharTransformer:
    """Additive couplings, two streams of the baseline's width."""
    return baseline(block=CouplingBlock, stack=CouplingStack, streams=2)


def l2_baseline() -> CharTransformer:
    """The baseline with tied L2 attention."""
    return baseline(L2Attention)


def convolutional_baseline() -> CharTransformer:
    """The baseline with hidden units that see three tokens."""
    return baseline(kernel=3)


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
