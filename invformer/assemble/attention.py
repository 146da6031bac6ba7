"""The attention behind every name in ``ATTENTIONS`` of ``config/schema.py``."""

from collections.abc import Callable
from typing import Any

from invformer.config.schema import ModelConfig
from invformer.nn.attention import ContractiveL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.kim_attention import L2Attention, PaperContractiveL2Attention
from invformer.nn.position_bias import CausalMask


def dot_product(config: ModelConfig, position: CausalMask) -> DotProductAttention:
    """The baseline, and the attention of the reversible model."""
    return DotProductAttention(config.d_model, config.num_heads, position, config.attention_kernel)


def l2(config: ModelConfig, position: CausalMask) -> L2Attention:
    """Tied L2 attention, not scaled."""
    return L2Attention(config.d_model, config.num_heads, position, config.attention_kernel)


def contractive_l2(
    config: ModelConfig, position: CausalMask, channels: slice | None
) -> ContractiveL2Attention | PaperContractiveL2Attention:
    """Tied L2 attention, scaled by our theorems or by those of Kim et al. 2021."""
    sizes = config.d_model, config.num_heads, position, config.lipschitz_target
    match config.certificate:
        case "kim_entry_max" | "kim_frobenius" as bound:
            return PaperContractiveL2Attention(*sizes, bound, config.attention_kernel)
        case bound:
            kernel, size = config.attention_kernel, config.initial_output
            return ContractiveL2Attention(*sizes, bound or "token_max", channels, kernel, size)


def contractive_bounded(
    config: ModelConfig, position: CausalMask, channels: slice | None
) -> BoundedAttention:
    """Attention of queries, keys and values in the unit ball."""
    return BoundedAttention(
        config.d_model,
        config.num_heads,
        config.head_width,
        position,
        config.lipschitz_target,
        channels,
        config.attention_kernel,
        config.initial_output,
        "causal" if config.certificate == "causal" else "token_max",
        config.strictly_causal,
    )


# A contractive one also gets the channels that it writes to at first.
BUILDERS: dict[str, Callable[..., Any]] = {
    "dot_product": dot_product,
    "l2": l2,
    "reversible": dot_product,
    "contractive_l2": contractive_l2,
    "contractive_bounded": contractive_bounded,
}
