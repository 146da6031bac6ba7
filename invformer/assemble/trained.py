"""Opening a trained model: of a run, of one checkpoint, of an exported folder, or of the Hub."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from invformer.assemble.exported import WEIGHTS, Trained, download, read_export
from invformer.assemble.model import untrained
from invformer.config.schema import TrainConfig
from invformer.config.trained import is_hub_name
from invformer.data.vocabulary import Vocabulary
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import PREFIX, Checkpoint, read_checkpoint

FIRST_BLOCK = "stack.blocks.0."


def load_trained(source: str) -> Trained:
    """The model of a source as of :func:`invformer.load`, which also says what is raised."""
    folder = Path(os.path.expanduser(source))
    if is_hub_name(source):
        return read_export(download(source), Path(source.replace("/", "--")))
    if (folder / WEIGHTS).is_file():
        return read_export(folder, folder)
    checkpoint = read_checkpoint(source)
    config = checkpoint.configuration(monitor={})  # whose keys change, and which is no part of it
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    return Trained(load_model(checkpoint, config, vocabulary), vocabulary, config, checkpoint)


def load_model(
    checkpoint: Checkpoint, config: TrainConfig, vocabulary: Vocabulary
) -> CharTransformer:
    """The trained model in eval mode.

    Raises:
        CheckpointError: the weights do not fit the configuration or are not finite, or the state
            beside the weights, which is not used here, is damaged.
    """
    wanted = weights_on_meta(config, vocabulary.size)
    weights = checkpoint.read_weights({PREFIX + name: w for name, w in wanted.items()})
    checkpoint.read_state()  # a checkpoint is taken whole or not at all
    model = untrained(config, vocabulary.size)
    model.load_state_dict({name.removeprefix(PREFIX): w for name, w in weights.items()})
    return model.eval()


def weights_on_meta(config: TrainConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """The weights of a model, on ``meta`` and without making one: all blocks are alike."""
    one_block = replace(config, model=replace(config.model, num_layers=1))
    with torch.device("meta"):
        weights = untrained(one_block, vocab_size).state_dict()
    return {
        name.replace(FIRST_BLOCK, f"stack.blocks.{index}.", 1): weight
        for name, weight in weights.items()
        for index in range(config.model.num_layers if name.startswith(FIRST_BLOCK) else 1)
    }
