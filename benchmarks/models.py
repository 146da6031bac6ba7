"""The models that are compared, at the same width, depth, heads, bias and batch."""

import pydoc_data.topics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plain import PlainTransformer
from invformer.branches.branch import LipschitzBranch
from invformer.kernels.attention import Kernel
from invformer.nn import (
    BoundedAttention,
    CharTransformer,
    ContractiveFeedForward,
    ContractiveL2Attention,
    DiagonalScaling,
    DotProductAttention,
    FeedForward,
    InvertibleBlock,
    InvertibleStack,
    L2Attention,
    PreNormBlock,
    PreNormStack,
    RelativePositionBias,
    written_channels,
)
from invformer.nn.transformer import CharEmbedding

TEXT = "\n".join(pydoc_data.topics.topics.values())
VOCABULARY = {character: index for index, character in enumerate(sorted(set(TEXT)))}
LIPSCHITZ_TARGET = 0.5
# What is timed: the project's models, and one written without it.
MODELS = ("dot_product", "l2", "contractive_l2", "contractive_bounded", "plain")
ATTENTIONS = (DotProductAttention, L2Attention, ContractiveL2Attention, BoundedAttention)


@dataclass(frozen=True)
class Case:
    """Sizes that all models of a comparison share.

    Attributes:
        seq_len: N, characters of context.
        d_model: D, width.
        num_layers: L, blocks.
        num_heads: H.
        batch_size: windows a step.
    """

    seq_len: int
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    batch_size: int = 8

    @property
    def name(self) -> str:
        """Such as ``n256-d128-l4-h4-b8``."""
        return (
            f"n{self.seq_len}-d{self.d_model}-l{self.num_layers}-h{self.num_heads}"
            f"-b{self.batch_size}"
        )

    @property
    def characters(self) -> int:
        """Characters a step."""
        return self.seq_len * self.batch_size

    def to_dict(self) -> dict[str, int]:
        """Its sizes by name."""
        return asdict(self)


def build(name: str, case: Case, device: torch.device, kernel: Kernel = "auto") -> nn.Module:
    """One model, freshly initialised with the same seed as the others.

    Args:
        name: which of ``MODELS``.
        case: sizes.
        device: where it lies.
        kernel: what its attention runs on; ``plain`` has PyTorch's own.
    """
    torch.manual_seed(0)
    vocab_size, d_model, seq_len = len(VOCABULARY), case.d_model, case.seq_len
    if name == "plain":
        model: nn.Module = PlainTransformer(
            vocab_size, seq_len, d_model, case.num_heads, case.num_layers
        )
    else:
        contractive = name.startswith("contractive")
        d_embedding = d_model // 3 if contractive else d_model
        make_stack = contractive_stack if contractive else pre_norm_stack
        stack = make_stack(name, case)
        embedding = CharEmbedding(vocab_size, seq_len, d_model, d_embedding)
        model = CharTransformer(embedding, stack, vocab_size, d_model)
        model.initialise(windows(case, torch.device("cpu"))[0][:8])
        for module in model.modules():
            if isinstance(module, ATTENTIONS):
                module.kernel = kernel
    return model.to(device)


def compile_blocks(model: nn.Module) -> nn.Module:
    """The same model, each block compiled by itself, as ``trainer.compile=true`` does."""
    blocks = model.blocks if isinstance(model, PlainTransformer) else model.stack.blocks
    for block in blocks:
        block.compile()
    return model


def contractive_stack(name: str, case: Case) -> InvertibleStack:
    """The invertible stack with the defaults of ``model=contractive_l2`` or ``…_bounded``."""
    width, heads = case.d_model, case.num_heads
    d_embedding = width // 3
    blocks = []
    for index in range(case.num_layers):
        bias = RelativePositionBias(heads, case.seq_len)
        if name == "contractive_l2":
            attention: LipschitzBranch = ContractiveL2Attention(
                width, heads, bias, LIPSCHITZ_TARGET
            )
        else:
            attention = BoundedAttention(width, heads, width // heads, bias, LIPSCHITZ_TARGET)
        feed_forward = ContractiveFeedForward(width, 4 * width, LIPSCHITZ_TARGET)
        written = written_channels(width, index, first=d_embedding)
        scalings = tuple(DiagonalScaling(width, channels) for channels in written)
        blocks.append(InvertibleBlock(attention, feed_forward, scalings=scalings))
    return InvertibleStack(blocks, case.seq_len)


def pre_norm_stack(name: str, case: Case) -> PreNormStack:
    """An unconstrained stack with the same bias, feed-forward width and activation."""
    attention: Any = {"dot_product": DotProductAttention, "l2": L2Attention}[name]
    return PreNormStack(
        [
            PreNormBlock(
                attention(
                    case.d_model, case.num_heads, RelativePositionBias(case.num_heads, case.seq_len)
                ),
                FeedForward(case.d_model, 4 * case.d_model, "silu"),
                case.d_model,
            )
            for _ in range(case.num_layers)
        ]
    )


def windows(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch of inputs and targets, from the text that ships inside Python."""
    needed = case.characters + case.batch_size
    text = TEXT * (needed // len(TEXT) + 1)
    tokens = torch.tensor([VOCABULARY[character] for character in text[:needed]])
    rows = tokens.view(case.batch_size, case.seq_len + 1).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
