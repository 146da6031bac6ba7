"""From a configuration to a model: one ``match`` per choice."""

import math
from typing import Any

import torch

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward, FeedForward
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.branches.tied_l2.attention import ContractiveL2Attention
from invformer.branches.tied_l2.kim import L2Attention, PaperContractiveL2Attention
from invformer.config.schema import ModelConfig, TrainConfig
from invformer.nn.coupling import CouplingBlock, CouplingStack
from invformer.nn.residual import InvertibleBlock
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack
from invformer.numerics.norms import Norm
from invformer.weights.position_bias import CausalMask, RelativePositionBias
from invformer.weights.scaling import DiagonalScaling, written_channels

KIM_NORMS: dict[str, Norm] = {"kim_entry_max": "entry_max", "kim_frobenius": "frobenius"}


def untrained(config: TrainConfig, vocab_size: int) -> CharTransformer:
    """The model as training began with it, in the precision that its weights are kept in."""
    model = build_model(config.model, vocab_size, config.data.seq_len)
    return model.to(torch.float64 if config.trainer.precision == "64-true" else torch.float32)


def build_model(config: ModelConfig, vocab_size: int, seq_len: int) -> CharTransformer:
    """The language model a configuration asks for, freshly initialised."""
    streams = 2 if config.name == "reversible" else 1
    width, d_embedding = streams * config.d_model, streams * config.embedding_width
    embedding = CharEmbedding(vocab_size, seq_len, width, d_embedding)
    build_stack = build_invertible_stack if config.is_contractive else build_pre_norm_stack
    stack = build_stack(config, seq_len)
    return CharTransformer(embedding, stack, vocab_size, width, config.head_dropout)


def build_invertible_stack(config: ModelConfig, seq_len: int) -> InvertibleStack:
    """Contractive blocks, each first writing to its own share of the padded channels."""
    assert config.certificate is not None
    width, d_embedding, radius = config.d_model, config.embedding_width, config.input_radius
    share = (width - d_embedding) // config.num_layers
    if radius is not None:  # ActNorm's channels have unit variance, tokens the length √D
        radius *= math.sqrt(width)
    blocks = []
    for index in range(config.num_layers):
        first = d_embedding + index * share
        padded = share and not config.diagonal_scaling
        channels = slice(first, first + share) if padded else None
        attention = build_attention(config, seq_len, channels)
        feed_forward = ContractiveFeedForward(
            width,
            config.feed_forward_width,
            config.lipschitz_target,
            norm="entry_max" if config.certificate == "kim_entry_max" else "spectral",
            kernel=config.feed_forward_kernel,
            activation=config.activation,
            output_channels=channels,
            initial_sharpness=config.initial_sharpness,
            initial_output=config.initial_output,
        )
        scalings: tuple[DiagonalScaling | None, DiagonalScaling | None] = None, None
        if config.diagonal_scaling:
            written = written_channels(width, index, config.written_channels, d_embedding)
            scalings = DiagonalScaling(width, written[0]), DiagonalScaling(width, written[1])
        d_norm = width if config.activation_norm else None
        blocks.append(
            InvertibleBlock(attention, feed_forward, d_norm, radius, scalings, config.dropout)
        )
    kind = "causal" if config.certificate == "causal" else "global"
    return InvertibleStack(blocks, seq_len, KIM_NORMS.get(config.certificate, "token_max"), kind)


def build_pre_norm_stack(config: ModelConfig, seq_len: int) -> PreNormStack:
    """The blocks of a baseline."""
    couples = config.name == "reversible"
    make_block = CouplingBlock if couples else PreNormBlock
    width, hidden = config.d_model, config.feed_forward_width
    blocks = [
        make_block(
            build_attention(config, seq_len),
            FeedForward(width, hidden, config.activation, config.feed_forward_kernel),
            width,
            config.dropout,
        )
        for _ in range(config.num_layers)
    ]
    return CouplingStack(blocks) if couples else PreNormStack(blocks)


def build_attention(config: ModelConfig, seq_len: int, channels: slice | None = None) -> Any:
    """The attention of one block; a contractive one writes to ``channels`` at first."""
    position = CausalMask(seq_len)
    if config.position_bias:
        sees_itself = not config.strictly_causal
        position = RelativePositionBias(config.num_heads, seq_len, sees_itself=sees_itself)
    common: dict[str, Any] = {
        "d_model": config.d_model, "num_heads": config.num_heads, "position": position,
        "kernel": config.attention_kernel,
    }  # fmt: skip
    target = config.lipschitz_target
    written = {"output_channels": channels, "initial_output": config.initial_output}
    match config.name, config.certificate:
        case "dot_product" | "reversible", None:
            return DotProductAttention(**common)
        case "l2", None:
            return L2Attention(**common)
        case "contractive_l2", ("kim_entry_max" | "kim_frobenius") as bound:
            return PaperContractiveL2Attention(**common, lipschitz_target=target, certificate=bound)
        case "contractive_l2", ("token_max" | "causal") as bound:
            return ContractiveL2Attention(
                **common, **written, lipschitz_target=target, certificate=bound
            )
        case "contractive_bounded", ("token_max" | "causal") as bound:
            return BoundedAttention(
                **common, **written, lipschitz_target=target, certificate=bound,
                d_head=config.head_width, strictly_causal=config.strictly_causal,
            )  # fmt: skip
    raise ValueError(f"no attention is called {config.name}")
