"""Attention layers whose constants are measured, and the inputs that a text gives them.

They come from untrained models of ours and from checkpoints. Every layer is handed out bare (no
residual, no LayerNorm, no dropout) and in float64. Attacks are on random weights of GPT-2's shape.
"""

import copy
import math
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
from invformer.nn.attention import TiedL2Attention
from invformer.nn.kim_attention import paper_output_map
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.transformer import CharTransformer, PreNormBranch
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.linear_map import LinearMap, linearise
from studies.layer_bounds import Layer, project, tied_attention

DTYPE = torch.float64
SMALL_CONTEXT = 128
GPT2_INIT, GPT2_WIDTH, GPT2_HEADS = 0.02, 768, 12


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
def layer_of(
    model: CharTransformer, tokens: Tensor, layer: int
) -> tuple[Layer, Float[Tensor, "sequences tokens width"]]:
    """The attention of one block and the inputs it gets."""
    probe = LipschitzProbe(model, tokens)
    index = list(probe.names).index(f"block_{layer:02d}/attention")
    branch, x = list(probe.branches)[index], list(probe.inputs())[index]
    if isinstance(branch, PreNormBranch):
        x, branch = branch.norm(x), branch.inner
    assert isinstance(branch, Layer)
    return branch, x


def unmasked_jacobian(layer: Layer, x: Float[Tensor, "sequences tokens width"]) -> LinearMap:
    """The Jacobian of a layer with the same weights in which every token sees all."""
    n = x.shape[-2]
    if isinstance(layer, TiedL2Attention):  # a contractive layer's weights depend on its mask
        weights = layer.weights()
        return linearise(lambda z: tied_attention(z, *weights), x)
    layer = copy.deepcopy(layer)
    layer.position = VisibilityMask(torch.ones(n, n, dtype=torch.bool))
    return linearise(layer, x)


# --- no network: random weights of GPT-2's shape -------------------------------------------------


class Weights(NamedTuple):
    """Weights of dot-product heads: (H, D, d) each, and an output map (H d, D) if there is one."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """f(X) = [softmax(Q_h K_hᵀ/√d) V_h]_h W^O, every token sees all."""
        q, k, v = (project(x, w) for w in self[:3])
        y = merge_heads((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)
        return y if self.w_o is None else y @ self.w_o


@lru_cache(maxsize=1)
def random_weights(seed: int) -> Weights:
    """Random weights of the shape and the size of GPT-2's at initialisation, heads concatenated."""
    generator = torch.Generator().manual_seed(seed)
    shape = (GPT2_WIDTH, 3 * GPT2_WIDTH)
    parts = GPT2_INIT * torch.randn(shape, generator=generator, dtype=DTYPE)
    return Weights(*(split_heads(w, GPT2_HEADS) for w in parts.chunk(3, dim=1)))


def tied_weights(weights: Weights) -> tuple[Tensor, Tensor]:
    """Tied L2 attention of one head with the same W^Q and W^V, made comparable in size.

    Its value path has the factor W^Q W^Qᵀ/√d, tiny for small weights: it is scaled to norm one.
    """
    assert weights.w_o is not None
    d_head = weights.w_q.shape[-1]
    g = paper_output_map(weights.w_q, weights.w_v, weights.w_o.unflatten(0, (-1, d_head)))
    factor = torch.linalg.matrix_norm(weights.w_q, 2).square() / math.sqrt(d_head)
    return weights.w_q, g / factor[:, None, None]
