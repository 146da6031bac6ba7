"""Attention layers whose constants are measured: their weights, and the inputs a text gives them.

They come from untrained models of ours, from checkpoints, and from GPT-2 and BERT: published
weights or random ones, and our own layers in their shape where ``transformers`` is missing. Every
layer is handed out bare (no residual, no LayerNorm, no dropout) and in float64; the network before
it runs in its own precision. Small models of ours and checkpoints read characters, the rest words.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.assemble.model import build_model
from invformer.assemble.run import read_corpus
from invformer.assemble.saved_model import load_model, trained_configuration
from invformer.config.schema import ModelConfig
from invformer.data.corpora import Corpus, load_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.lipschitz.branch_jacobians import residual_branches
from invformer.nn.attention import DotProductAttention, TiedL2Attention, split_heads
from invformer.nn.branch import frozen_weights
from invformer.nn.transformer import CharTransformer, PreNormBranch

DTYPE = torch.float64
GPT2_INIT = 0.02  # standard deviation of every weight of a random GPT-2 or BERT
GPT2_WIDTH, GPT2_HEADS, GPT2_LAYERS = 768, 12, 12
SMALL_CONTEXT = 128
TEXT_OPTION = "text"  # what the study calls the file or folder it reads
HUB_TIMEOUT = 5.0  # seconds to wait for the Hub's first answer
TOKENISED_CHARACTERS = 200_000  # enough for ten sequences of a thousand tokens


class DotProduct(NamedTuple):
    """Weights of a dot-product layer: (H, D, d) each, biases (H, 1, d), output map (H d, D)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    w_o: Tensor | None = None


class TiedL2(NamedTuple):
    """Weights of a tied L2 layer: W^Q (H, D, d) and output maps G (H, d, D)."""

    w_q: Tensor
    g: Tensor


@dataclass(frozen=True)
class Layer:
    """An attention layer with the inputs a text gives it.

    Attributes:
        weights: in float64.
        inputs: X, (sequences, n, D), in float64.
        bias: what a causal layer adds to its logits, −∞ where hidden.
    """

    weights: DotProduct | TiedL2
    inputs: Float[Tensor, "sequences tokens width"]
    bias: Float[Tensor, "#heads tokens tokens"]


@dataclass(frozen=True)
class Source:
    """A network as far as a study needs it.

    Attributes:
        tokens: the text as the network reads it.
        layer: tokens (sequences, n) and the number of a layer to that layer.
    """

    tokens: Tensor
    layer: Callable[[Tensor, int], Layer]


@lru_cache(maxsize=1)
def source(model: str, path: str, attention: str, text: str, seed: int) -> Source:
    """The network and its text; kept for the next case."""
    if model == "checkpoint":
        return checkpoint_source(path, text)
    if model == "small":
        return small_source(attention, read_text(text), seed)
    return word_source(model, path, read_text(text), seed)


def read_text(path: str) -> str:
    """The training text of a file or folder, or of python_docs."""
    return corpus_at(path).train


def corpus_at(path: str) -> Corpus:
    """A file or folder, or python_docs.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return load_corpus("text_file" if path else "python_docs", path or None)
    except DataError as error:  # which names the option of train.py; it is another one here
        raise DataError(str(error).replace("data.path", TEXT_OPTION)) from None


def digest_of_text(model: str, path: str, text: str) -> str:
    """The beginning of the SHA-256 of the corpus that :func:`source` reads."""
    if model == "checkpoint" and not text:
        return read_corpus(trained_configuration(read_checkpoint(path)).data).sha256[:16]
    return corpus_at(text).sha256[:16]


def digest_of_weights(model: str, path: str, seed: int) -> str:
    """The beginning of the SHA-256 of stored weights; empty for those that only a seed decides."""
    if not path:
        return ""
    if model == "checkpoint":
        return read_checkpoint(path).sha256[:16]
    sha = hashlib.sha256()
    for name, weight in network(model, path, seed)[0].state_dict().items():
        sha.update(name.encode())
        sha.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()[:16]


def small_config(name: str) -> ModelConfig:
    """A small model of ours without position bias: its mask alone says who sees whom."""
    is_baseline = name != "contractive_l2"
    return ModelConfig(
        name=name,  # pyright: ignore[reportArgumentType]
        certificate=None if is_baseline else "token_max",
        d_model=64, num_heads=4, num_layers=4, position_bias=False, channel_metric=False,
    )  # fmt: skip


def small_source(name: str, text: str, seed: int) -> Source:
    """A freshly initialised model of ours on characters."""
    vocabulary = Vocabulary.from_text(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(small_config(name), vocabulary.size, SMALL_CONTEXT).to(DTYPE).eval()
    tokens = vocabulary.encode(text).long()
    return Source(tokens, lambda batch, layer: layer_of(model, batch, layer))


def checkpoint_source(path: str, text: str) -> Source:
    """A trained model of ours, on the given text or the test split of its own."""
    checkpoint = read_checkpoint(path)
    trained = trained_configuration(checkpoint)
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    model = load_model(checkpoint, trained, vocabulary).to(DTYPE)
    words = read_text(text) if text else read_corpus(trained.data).split("test")
    tokens = vocabulary.encode(words).long()
    return Source(tokens, lambda batch, layer: layer_of(model, batch, layer))


@torch.no_grad()
def layer_of(model: CharTransformer, tokens: Tensor, layer: int) -> Layer:
    """The attention of one block of ours with the inputs it gets."""
    wanted = f"block_{layer:02d}/attention"
    with frozen_weights(model):
        for name, branch, x in residual_branches(model, model.embedding(tokens)):
            if name != wanted:
                continue
            if isinstance(branch, PreNormBranch):
                x, branch = branch.norm(x), branch.inner
            if isinstance(branch, TiedL2Attention):
                weights = TiedL2(*(w.to(DTYPE) for w in branch.weights()))
            else:
                assert isinstance(branch, DotProductAttention)
                weights = own_weights(branch)
            bias = branch.position(x.shape[-2])  # pyright: ignore[reportCallIssue]
            return Layer(weights, x.to(DTYPE), bias.to(DTYPE))
    raise AssertionError(f"no {wanted}")


def own_weights(attention: DotProductAttention) -> DotProduct:
    """The weights of our dot-product layer."""
    parts = attention.qkv.weight.mT.chunk(3, dim=1)
    w_q, w_k, w_v = (head_matrices(w, attention.num_heads) for w in parts)
    return DotProduct(w_q, w_k, w_v, w_o=attention.out.weight.mT.to(DTYPE))


def head_matrices(w: Float[Tensor, "width width"], num_heads: int) -> Tensor:
    """x ↦ x W cut into heads: (D, H d) → (H, D, d), in float64."""
    return split_heads(w.detach().to(DTYPE), num_heads)


class Shape(NamedTuple):
    """What a network allows."""

    num_layers: int
    context: int
    vocab_size: int
    num_heads: int


@lru_cache(maxsize=1)
def network(name: str, path: str, seed: int) -> tuple[nn.Module, Shape]:
    """The network of that name in eval mode: weights from the path, or random from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, shape = own_network(name) if name.endswith("_shape") else hub_network(name, path)
    return model.eval(), shape


def own_network(name: str) -> tuple[CharTransformer, Shape]:
    """Our pre-norm dot-product model in the shape, and with the random weights, of GPT-2."""
    config = small_config("dot_product")
    shape = Shape(config.num_layers, SMALL_CONTEXT, 1000, config.num_heads)
    if name != "small_shape":
        config = ModelConfig(
            name="dot_product", certificate=None, d_model=GPT2_WIDTH, num_heads=GPT2_HEADS,
            num_layers=GPT2_LAYERS, position_bias=False, activation="gelu",
        )  # fmt: skip
        shape = Shape(GPT2_LAYERS, 512, 30000, GPT2_HEADS)
    model = build_model(config, shape.vocab_size, shape.context)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=GPT2_INIT)
    return model, shape


def hub_network(name: str, path: str) -> tuple[nn.Module, Shape]:
    """GPT-2 or BERT through transformers."""
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    is_gpt2 = name.endswith("gpt2")
    kind = transformers.GPT2Model if is_gpt2 else transformers.BertModel
    model: Any
    if path:
        model = pretrained(kind, path)
    else:
        names = ("n_embd", "n_layer", "n_head") if is_gpt2 else (
            "hidden_size", "num_hidden_layers", "num_attention_heads"
        )  # fmt: skip
        small = dict(zip(names, (64, 4, 4), strict=True)) if name.startswith("small_") else {}
        config = (transformers.GPT2Config if is_gpt2 else transformers.BertConfig)(**small)
        model = kind(config)
    config = model.config
    return model, Shape(
        config.num_hidden_layers, config.max_position_embeddings, config.vocab_size,
        config.num_attention_heads,
    )  # fmt: skip


def pretrained(kind: Any, path: str) -> nn.Module:
    """Published weights, from here if they are here, else from the Hub if it answers."""
    try:
        return kind.from_pretrained(path, local_files_only=True)
    except OSError:
        if Path(path).is_dir():
            raise
        import huggingface_hub

        huggingface_hub.HfApi().model_info(path, timeout=HUB_TIMEOUT)
        return kind.from_pretrained(path)


def word_source(name: str, path: str, text: str, seed: int) -> Source:
    """A network on words: the tokeniser's where it has trained weights, else by frequency."""
    model, shape = network(name, path, seed)
    if path:
        import transformers  # pyright: ignore[reportMissingImports]

        try:
            tokeniser = transformers.AutoTokenizer.from_pretrained(path)
        except Exception as error:
            raise DataError(
                f"model_path: {path} has weights but no tokeniser that loads"
            ) from error
        start = text[:TOKENISED_CHARACTERS]
        tokens = torch.tensor(tokeniser(start, add_special_tokens=False)["input_ids"])
        if len(tokens) == 0:  # what transformers makes of a folder without a tokeniser
            raise DataError(f"model_path: {path} has weights but no tokeniser that reads the text")
    else:
        tokens = words_by_frequency(text).clamp(max=shape.vocab_size - 1)
    if isinstance(model, CharTransformer):
        return Source(tokens, lambda batch, layer: layer_of(model, batch, layer))
    return Source(tokens, lambda batch, layer: hub_layer(model, shape, batch, layer))


def words_by_frequency(text: str) -> Tensor:
    """Words and marks as numbers, the most frequent word 0."""
    words = re.findall(r"\w+|[^\w\s]", text)
    number = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([number[word] for word in words])


@torch.no_grad()
def hub_layer(model: Any, shape: Shape, tokens: Tensor, layer: int) -> Layer:
    """One attention layer of GPT-2 or BERT with the inputs it gets."""
    states = model(input_ids=tokens, output_hidden_states=True).hidden_states[layer]
    weights = hub_weights(model, shape.num_heads, layer)
    x = model.h[layer].ln_1(states) if hasattr(model, "h") else states
    return Layer(weights, x.to(DTYPE), causal_bias(x.shape[-2]))


def hub_weights(model: Any, num_heads: int, layer: int) -> DotProduct:
    """The weights of GPT-2's or BERT's layer; value and output biases only shift the output."""
    if hasattr(model, "h"):
        attention = model.h[layer].attn
        q, k, v = attention.c_attn.weight.chunk(3, dim=1)
        b_q, b_k, _ = attention.c_attn.bias.chunk(3)
        w_o = attention.c_proj.weight
    else:
        attention = model.encoder.layer[layer].attention
        inner = attention.self
        q, k, v = (part.weight.mT for part in (inner.query, inner.key, inner.value))
        b_q, b_k = inner.query.bias, inner.key.bias
        w_o = attention.output.dense.weight.mT
    w_q, w_k, w_v = (head_matrices(w, num_heads) for w in (q, k, v))
    b_q, b_k = (split_heads(b.detach().to(DTYPE)[None], num_heads) for b in (b_q, b_k))
    return DotProduct(w_q, w_k, w_v, b_q, b_k, w_o.detach().to(DTYPE))


def causal_bias(num_tokens: int) -> Float[Tensor, "one tokens tokens"]:
    """Zero where j ≤ i, −∞ elsewhere."""
    hidden = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return torch.zeros(hidden.shape, dtype=DTYPE).masked_fill(hidden, -math.inf)
