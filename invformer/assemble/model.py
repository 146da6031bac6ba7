"""From a model configuration to modules: one ``match`` per choice."""

import math
from typing import Any

from invformer.config.schema import ModelConfig
from invformer.nn.attention import ContractiveL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.branch import LipschitzBranch
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.feed_forward import ContractiveFeedForward, FeedForward
from invformer.nn.kim_attention import L2Attention, PaperContractiveL2Attention
from invformer.nn.position_bias import (
    CausalMask,
    LinearPositionBias,
    RelativePositionBias,
    SinusoidalPositionBias,
)
from invformer.nn.residual import InvertibleBlock
from invformer.nn.scaling import DiagonalScaling, loud_channels
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack
from invformer.numerics.norms import Norm

NORM_OF_CERTIFICATE: dict[str, Norm] = {
    "token_max": "token_max",
    "causal": "token_max",
    "kim_entry_max": "entry_max",
    "kim_frobenius": "frobenius",
}


def build_model(config: ModelConfig, vocab_size: int, seq_len: int) -> CharTransformer:
    """The language model a configuration asks for, freshly initialised."""
    contractive = config.is_contractive
    d_embedding = config.embedding_width if contractive else config.d_model
    embedding = CharEmbedding(vocab_size, seq_len, config.d_model, d_embedding)
    if contractive:
        stack = build_invertible_stack(config, seq_len, d_embedding)
    else:
        stack = PreNormStack(
            [build_pre_norm_block(config, seq_len) for _ in range(config.num_layers)]
        )
    return CharTransformer(embedding, stack, vocab_size, config.d_model, config.head_dropout)


def build_invertible_stack(config: ModelConfig, seq_len: int, d_embedding: int) -> InvertibleStack:
    """Contractive blocks, each first writing to its own share of the padded channels."""
    assert config.certificate is not None
    share = (config.d_model - d_embedding) // config.num_layers
    radius = config.input_radius
    if radius is not None:  # ActNorm's channels have unit variance, tokens the length √D
        radius *= math.sqrt(config.d_model)
    blocks = []
    for index in range(config.num_layers):
        first = d_embedding + index * share
        padded = share and not config.channel_metric
        channels = slice(first, first + share) if padded else None
        attention = build_contractive_attention(config, seq_len, channels)
        feed_forward = build_contractive_feed_forward(config, channels)
        d_norm = config.d_model if config.activation_norm else None
        scalings = None, None
        if config.channel_metric:
            loud = loud_channels(config.d_model, index, config.loud_channels, d_embedding)
            scalings = tuple(DiagonalScaling(config.d_model, channels) for channels in loud)
        blocks.append(InvertibleBlock(attention, feed_forward, d_norm, radius, scalings))
    kind = "causal" if config.certificate == "causal" else "global"
    return InvertibleStack(blocks, seq_len, NORM_OF_CERTIFICATE[config.certificate], kind)


def build_contractive_attention(
    config: ModelConfig, seq_len: int, channels: slice | None
) -> LipschitzBranch:
    """The contractive attention whose constant the chosen certificate bounds."""
    position = build_position(config, seq_len)
    width, heads, target = config.d_model, config.num_heads, config.lipschitz_target
    kernel, size = config.attention_kernel, config.initial_output
    if config.name == "contractive_bounded":
        certificate = "causal" if config.certificate == "causal" else "token_max"
        return BoundedAttention(
            width,
            heads,
            config.head_width,
            position,
            target,
            channels,
            kernel,
            size,
            certificate,
            config.strictly_causal,
        )
    match config.certificate:
        case "token_max" | "causal":
            return ContractiveL2Attention(
                width, heads, position, target, config.certificate, channels, kernel, size
            )
        case "kim_entry_max" | "kim_frobenius":
            return PaperContractiveL2Attention(
                width, heads, position, target, config.certificate, kernel
            )
        case None:
            raise AssertionError("a contractive model has a certificate")


def build_contractive_feed_forward(
    config: ModelConfig, channels: slice | None
) -> ContractiveFeedForward:
    """The contractive feed-forward, of single tokens or of several."""
    size = config.d_model, config.feed_forward_width, config.lipschitz_target
    options: dict[str, Any] = {
        "activation": config.activation,
        "output_channels": channels,
        "initial_sharpness": config.initial_sharpness,
        "initial_output": config.initial_output,
    }
    norm = "entry_max" if config.certificate == "kim_entry_max" else "spectral"
    return ContractiveFeedForward(*size, norm=norm, kernel=config.feed_forward_kernel, **options)


def build_pre_norm_block(config: ModelConfig, seq_len: int) -> PreNormBlock:
    """One block of a baseline."""
    position = build_position(config, seq_len)
    attention = L2Attention if config.name == "l2" else DotProductAttention
    size = config.d_model, config.feed_forward_width
    kernel = config.feed_forward_kernel
    return PreNormBlock(
        attention(config.d_model, config.num_heads, position, config.attention_kernel),
        FeedForward(*size, config.activation, kernel),
        config.d_model,
        config.dropout,
    )


def build_position(config: ModelConfig, seq_len: int) -> CausalMask:
    """A causal mask, with a learned relative bias or without."""
    if not config.position_bias:
        return CausalMask(seq_len)
    form = {
        "table": RelativePositionBias,
        "linear": LinearPositionBias,
        "sinusoid": SinusoidalPositionBias,
    }[config.position_bias_form]
    return form(config.num_heads, seq_len, sees_itself=not config.strictly_causal)
