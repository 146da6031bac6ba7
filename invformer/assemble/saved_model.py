"""From a checkpoint to the model in it; what does not fit is refused before it takes memory."""

from dataclasses import replace
from typing import Any

import torch

from invformer.assemble.model import build_model
from invformer.config import from_dict
from invformer.config.schema import TrainConfig
from invformer.data.files import SavedPath
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CheckpointError, ConfigurationError
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import PREFIX, Checkpoint
from invformer.runs.encoding import Spec, specs_of

FIRST_BLOCK = "stack.blocks.0."
# Bytes that a block needs for a pair of tokens, and that are allowed: some, and more for weights.
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
    """A saved configuration in today's keys.

    Before there were weighted norms there were none. The monitor, whose keys changed, is no part of
    a model.
    """
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return config
    return {**config, "model": {"channel_metric": False, **model}, "monitor": {}}


def load_model(
    checkpoint: Checkpoint, config: TrainConfig, vocabulary: Vocabulary
) -> CharTransformer:
    """The trained model in eval mode.

    Raises:
        CheckpointError: the weights do not fit the configuration or are not finite, the model needs
            gigabytes of buffers that its few weights do not explain, or the state beside the
            weights, which is not used here, is damaged.
    """
    size, length = checkpoint.weight_bytes, config.data.seq_len
    pairs = config.model.num_layers * PAIR_BYTES * length**2
    if pairs > PAIR_SLACK + PAIR_PER_WEIGHT * size:
        raise CheckpointError(
            f"{checkpoint.path}: data.seq_len={length} would need {pairs:.2g} bytes of masks "
            f"beside {size} bytes of weights"
        )
    wanted = weight_specs(config, vocabulary.size)
    weights = checkpoint.read_weights({PREFIX + name: spec for name, spec in wanted.items()})
    checkpoint.read_state()  # a checkpoint is taken whole or not at all
    model = untrained(config, vocabulary.size)
    model.load_state_dict({name.removeprefix(PREFIX): w for name, w in weights.items()})
    return model.eval()


def weight_specs(config: TrainConfig, vocab_size: int) -> dict[str, Spec]:
    """Type and shape of every weight of a model, without making one: all blocks are alike."""
    one_block = replace(config, model=replace(config.model, num_layers=1))
    with torch.device("meta"):
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
