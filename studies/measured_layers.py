"""Attention layers whose constants are measured: their weights, and the inputs a text gives them.

They come from untrained models of ours and from checkpoints. Every layer is handed out bare (no
residual, no LayerNorm, no dropout) and in float64; the network before it runs in its own precision.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.assemble.model import build_model, load_trained, trained_configuration
from invformer.config.schema import DataConfig, ModelConfig
from invformer.data.corpora import Corpus, read_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.attention import TiedL2Attention, split_heads
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.transformer import CharTransformer, PreNormBranch

DTYPE = torch.float64
SMALL_CONTEXT = 128


class DotProduct(NamedTuple):
    """Weights of a dot-product layer: (H, D, d) each, output map (H d, D)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
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


@lru_cache(maxsize=1)
def source(
    model: str, path: str, attention: str, text: str, seed: int
) -> tuple[CharTransformer, Tensor]:
    """A fresh small model, or a checkpoint with the test split of its own text or another text."""
    if model == "checkpoint":
        trained = load_trained(path)
        network, vocabulary = trained.model.to(DTYPE), trained.vocabulary
        own = trained.config.data
        words = corpus_at(text).split("train") if text else read_corpus(own).split("test")
    else:
        words = corpus_at(text).split("train")
        vocabulary = Vocabulary.from_text(words)
        config = small_config(attention)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = build_model(config, vocabulary.size, SMALL_CONTEXT).to(DTYPE).eval()
    return network, vocabulary.encode(words).long()


def corpus_at(path: str) -> Corpus:
    """A file or folder, or python_docs.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_corpus(DataConfig(name="text_file", path=path) if path else DataConfig())
    except DataError as error:  # which names the option of train.py; it is another one here
        raise DataError(str(error).replace("data.path", "text")) from None


def digest_of_text(model: str, path: str, text: str) -> str:
    """The beginning of the SHA-256 of the corpus that :func:`source` reads."""
    if model == "checkpoint" and not text:
        return read_corpus(trained_configuration(read_checkpoint(path)).data).sha256[:16]
    return corpus_at(text).sha256[:16]


def small_config(name: str) -> ModelConfig:
    """A small model of ours without position bias: its mask alone says who sees whom."""
    return ModelConfig(
        name=name,  # pyright: ignore[reportArgumentType]
        certificate="token_max" if name == "contractive_l2" else None,
        d_model=64, num_heads=4, num_layers=4, position_bias=False, diagonal_scaling=False,
    )  # fmt: skip


@torch.no_grad()
def layer_of(model: CharTransformer, tokens: Tensor, layer: int) -> Layer:
    """The attention of one block with the inputs it gets."""
    wanted = f"block_{layer:02d}/attention"
    probe = LipschitzProbe(model, tokens)
    for name, branch, x in zip(probe.names, probe.branches, probe.inputs(), strict=True):
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
    """The weights of our dot-product layer, in float64."""
    parts = attention.qkv.weight.mT.chunk(3, dim=1)
    w_q, w_k, w_v = (split_heads(w.detach().to(DTYPE), attention.num_heads) for w in parts)
    return DotProduct(w_q, w_k, w_v, attention.out.weight.mT.to(DTYPE))
