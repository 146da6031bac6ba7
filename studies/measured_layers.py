"""Attention layers whose constants are measured, and the inputs that a text gives them.

They come from untrained models of ours and from checkpoints. Every layer is handed out bare (no
residual, no LayerNorm, no dropout) and in float64.
"""

import copy
from functools import lru_cache

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
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.transformer import CharTransformer, PreNormBranch
from invformer.numerics.linear_map import LinearMap, linearise
from studies.layer_bounds import Layer, attention_jacobian

DTYPE = torch.float64
SMALL_CONTEXT = 128


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
        return attention_jacobian(x, *layer.weights(), x.new_zeros(1, n, n))
    layer = copy.deepcopy(layer)
    layer.position = VisibilityMask(torch.ones(n, n, dtype=torch.bool))
    return linearise(layer, x)
