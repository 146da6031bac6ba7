"""Encoders and decoders of Hugging Face's ``transformers``: their layers, masked and unmasked."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from invformer.errors import ConfigurationError, DataError
from invformer.lipschitz.measuring import measuring
from invformer.lipschitz.submodules import LocalConstants, checked_jacobian, first_calls
from invformer.numerics.linear_map import LinearMap

DTYPE = torch.float64
BLOCK = "block"  # in the place of a path inside a block


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A model in float64 and a text in its tokens.

    Attributes:
        blocks: where they stand in the model.
        parts: paths in a block of the attention modules, then the block itself.
        context: so many tokens it takes at most; None if there is no limit.
        sha256: of the weights and the tokens.
    """

    model: nn.Module
    tokens: Tensor
    blocks: list[str]
    parts: list[str]
    context: int | None
    sha256: str

    def call(self, tokens: Tensor, causal: bool | None) -> dict[str, Any]:
        """The arguments for one sequence; ``causal`` None leaves the mask to the model."""
        if causal is None:
            return {"input_ids": tokens[None]}
        size = len(tokens)
        hidden = torch.full((size, size), float("-inf") if causal else 0.0, dtype=DTYPE).triu(1)
        return {"input_ids": tokens[None], "attention_mask": hidden[None, None]}

    @torch.no_grad()
    def is_causal(self, causal: bool | None = None) -> bool:
        """Whether the first token's output stays when the last of four changes."""
        found = []
        with measuring(self.model):
            for last in (0, 1):
                tokens = torch.cat([self.tokens[:3], torch.tensor([last])])
                found.append(self.model(**self.call(tokens, causal)).last_hidden_state[0, 0])
        return torch.equal(*found)

    @cached_property
    def masks(self) -> list[bool]:
        """Whether tokens see only earlier ones: the model's own mask, then the other if it can."""
        own = self.is_causal()
        return [own] if self.is_causal(not own) is own else [own, not own]

    def jacobian(self, layer: int, part: str, causal: bool, tokens: Tensor) -> LinearMap:
        """∂f/∂x of a part f of a block at its input x for a sequence, both as rows."""
        name = self.blocks[layer] + ("" if part == BLOCK else f".{part}")
        given = self.call(tokens, None if causal is self.masks[0] else causal)
        with torch.no_grad(), measuring(self.model):
            call = first_calls(self.model, (given,), LocalConstants())[name]
            return checked_jacobian(call)


@lru_cache(maxsize=1)
def pretrained(name: str, text: str) -> Pretrained:
    """A model by its name or folder, and a text file in the tokens of its tokenizer.

    Raises:
        ConfigurationError: transformers is not installed, or there is no such encoder or decoder.
        DataError: the text cannot be read.
    """
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise ConfigurationError("pretrained: pip install 'invformer[transformers]'") from None
    try:
        words = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text={text}: cannot be read ({error})") from None
    where = str(Path(name).expanduser())
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModel.from_pretrained(where, attn_implementation="eager").to(DTYPE).eval()
    except Exception as error:  # it has many kinds of mistakes
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigurationError(f"pretrained={name}: no model with a tokenizer ({why})") from None
    model.config.use_cache = False
    blocks, parts = blocks_of(model)
    if model.config.is_encoder_decoder or not blocks:
        raise ConfigurationError(f"pretrained={name}: neither an encoder nor a decoder")
    tokens = tokenizer(words, add_special_tokens=False, verbose=False, return_tensors="pt")
    tokens = tokens["input_ids"][0]
    digest = hashlib.sha256(tokens.numpy().tobytes())
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    context = getattr(model.config, "max_position_embeddings", None)
    return Pretrained(model, tokens, blocks, parts, context, digest.hexdigest()[:16])


def blocks_of(model: nn.Module) -> tuple[list[str], list[str]]:
    """The outermost list of modules that all have attention in them, and that in its first."""
    for name, found in model.named_modules():
        if isinstance(found, nn.ModuleList):
            inside = [attentions_in(block) for block in found]
            if inside and all(inside):
                return [f"{name}.{i}" for i in range(len(found))], [*inside[0], BLOCK]
    return [], []


def attentions_in(block: nn.Module) -> list[str]:
    """Paths of the modules of which the class says that they are attention."""
    return [name for name, m in block.named_modules() if name and "Attention" in type(m).__name__]


def sequences(tokens: Tensor, num_tokens: int, count: int, seed: int) -> Tensor:
    """Sequences, (count, n), that do not overlap, from places that depend on the seed and not on n.

    Raises:
        DataError: the text is too short.
    """
    room = len(tokens) // count
    if room < 2 * num_tokens:
        raise DataError(
            f"the text has {len(tokens)} tokens, too few for {count} places of {2 * num_tokens}; "
            "choose fewer num_sequences or smaller sizes"
        )
    share = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    starts = room * torch.arange(count) + (share * (room // 2)).long()
    return tokens[starts[:, None] + torch.arange(num_tokens)]
