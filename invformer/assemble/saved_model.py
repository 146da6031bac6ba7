"""From a checkpoint to the model in it; what does not fit is refused before it takes memory."""

from dataclasses import replace
from typing import Any

import torch

from invformer.assemble.model import build_model
from invformer.config import from_dict
from invformer.config.schema import ModelConfig, TrainConfig
from invformer.data.files import SavedPath
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError, ConfigurationError
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import PREFIX, Checkpoint
from invformer.runs.encoding import MAX_HEADER, Spec, specs_of

FIRST_BLOCK = "stack.blocks.0."
# A block keeps, besides its weights, a mask and a table of lags for every pair of tokens.
PAIR_BYTES, PAIR_SLACK, PAIR_PER_WEIGHT = 9, 2 << 30, 16


def trained_configuration(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration a checkpoint was trained with; its path is marked as nobody's choice.

    Raises:
        CheckpointError: it is no valid configuration.
    """
    try:
        config = from_dict(as_it_was_meant(checkpoint.metadata["config"]))
    except ConfigurationError as error:
        raise CheckpointError(
            f"{checkpoint.path}: its configuration is invalid ({error})"
        ) from None
    if config.data.path is None:
        return config
    return replace(config, data=replace(config.data, path=SavedPath(config.data.path)))


def as_it_was_meant(config: Any) -> Any:
    """A configuration with what has another default since it was written: metrics were none."""
    model = config.get("model") if isinstance(config, dict) else None
    if isinstance(model, dict) and "channel_metric" not in model:
        return {**config, "model": {**model, "channel_metric": False}}
    return config


def load_model(
    checkpoint: Checkpoint, config: TrainConfig, vocabulary: Vocabulary
) -> CharTransformer:
    """The trained model in eval mode.

    Raises:
        CheckpointError: the weights do not fit the configuration or are not finite, or the state
            that lies beside them, which is not used here, is damaged.
    """
    refuse_other_size(checkpoint, config, vocabulary.size)
    wanted = weight_specs(config, vocabulary.size)
    weights = checkpoint.read_weights({PREFIX + name: spec for name, spec in wanted.items()})
    checkpoint.read_state()  # a checkpoint is taken whole or not at all
    model = untrained(config, vocabulary.size)
    model.load_state_dict({name.removeprefix(PREFIX): w for name, w in weights.items()})
    return model.eval()


def refuse_other_size(checkpoint: Checkpoint, config: TrainConfig, vocab_size: int) -> None:
    """Hold the file's size against the configuration's, without making anything of either size.

    Raises:
        CheckpointError: the model would be much larger or smaller than the file of its weights, or
            need gigabytes for attending over a context that its few weights do not explain.
    """
    model, length, size = config.model, config.data.seq_len, checkpoint.weight_bytes
    width, hidden = model.d_model, model.feed_forward_width
    outside = (vocab_size + length) * embedded(model) + vocab_size * width
    least = outside + model.num_layers * 2 * width * hidden
    attended = max(width, model.num_heads * model.head_width)
    block = (
        8 * width * attended
        + 4 * width * hidden * model.feed_forward_kernel
        + 64 * (attended + hidden)
    )
    most = 2 * outside + model.num_layers * (block + 4 * model.num_heads * length)
    if not 4 * least <= size <= 8 * most + MAX_HEADER:
        raise CheckpointError(
            f"{checkpoint.path}: its weights do not fit its configuration: they have {size} bytes, "
            f"the model has {least:.3g} to {most:.3g} parameters"
        )
    pairs = model.num_layers * PAIR_BYTES * length * length
    if pairs > PAIR_SLACK + PAIR_PER_WEIGHT * size:
        raise CheckpointError(
            f"{checkpoint.path}: data.seq_len={length} would need {pairs:.2g} bytes of masks "
            f"beside {size} bytes of weights"
        )


def weight_specs(config: TrainConfig, vocab_size: int) -> dict[str, Spec]:
    """Type and shape of every weight of a model, from a model with one block: all are alike."""
    one_block = replace(config, model=replace(config.model, num_layers=1))
    specs = specs_of(untrained(one_block, vocab_size).state_dict())
    return {
        name.replace(FIRST_BLOCK, f"stack.blocks.{index}.", 1): spec
        for name, spec in specs.items()
        for index in range(config.model.num_layers if name.startswith(FIRST_BLOCK) else 1)
    }


def untrained(config: TrainConfig, vocab_size: int) -> CharTransformer:
    """The model as training began with it, in the precision that its weights are kept in."""
    model = build_model(config.model, vocab_size, config.data.seq_len)
    return model.to(torch.float64 if config.trainer.precision == "64-true" else torch.float32)


def embedded(model: ModelConfig) -> int:
    """Channels that the embedding writes."""
    return model.embedding_width if model.is_contractive else model.d_model
