"""Opening a trained model: of a run, of one checkpoint, of an exported folder, or of the Hub."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from invformer.assemble.model import untrained
from invformer.config.schema import TrainConfig
from invformer.config.trained import is_hub_name
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CertificateViolation, CheckpointError, one_line
from invformer.nn.proof import certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import FORWARD_DTYPE
from invformer.runs.checkpoint import PREFIX, Checkpoint, open_checkpoint, read_checkpoint

FIRST_BLOCK = "stack.blocks.0."
ROUNDING = 1e-9  # relative, between the float64 arithmetic of two machines


def find_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint that a source as of :func:`invformer.load` means; raises CheckpointError."""
    path = os.fspath(source)
    if is_hub_name(path):
        return open_checkpoint(Path(path.replace("/", "--")), download(path))
    return read_checkpoint(path)


def configuration_of(checkpoint: Checkpoint) -> TrainConfig:
    """Of its training, without the monitor, whose keys change between versions."""
    return checkpoint.configuration(monitor={})


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """The characters behind its tokens."""
    return Vocabulary.from_dict(checkpoint.metadata["vocabulary"])


def restored(checkpoint: Checkpoint) -> CharTransformer:
    """The trained model in eval mode; if it was shared, its certificate is proven again.

    Raises:
        CheckpointError: the weights do not fit the configuration or are not finite, or the state
            beside the weights, which is not used here, is damaged.
        CertificateViolation: the weights do not have the certificate beside them.
    """
    config, vocab_size = configuration_of(checkpoint), vocabulary_of(checkpoint).size
    wanted = weights_on_meta(config, vocab_size)
    weights = checkpoint.read_weights({PREFIX + name: w for name, w in wanted.items()})
    if not checkpoint.is_shared:
        checkpoint.read_state()  # a checkpoint is taken whole or not at all
    model = untrained(config, vocab_size)
    model.load_state_dict({name.removeprefix(PREFIX): w for name, w in weights.items()})
    if checkpoint.is_shared:
        prove_again(model, checkpoint.metadata.get("certificate"), checkpoint.path)
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


def prove_again(network: CharTransformer, claimed: Any, path: Path) -> None:
    """Certify the weights, and compare with the certificate that came with them."""
    formats = {str(dtype).removeprefix("torch."): dtype for dtype in FORWARD_DTYPE.values()}
    match claimed:
        case None:
            return
        case {"dtype": str(name), "per_branch": dict(bounds)} if (
            name in formats
            and network.is_invertible
            and all(isinstance(bound, float) for bound in bounds.values())
        ):
            certificate = certify(network, dtype=formats[name])
        case _:
            raise CheckpointError(f"{path}: its certificate is none of such a model")
    proven = certificate.per_branch
    same = proven.keys() == bounds.keys() and all(
        bound <= bounds[name] * (1 + ROUNDING) for name, bound in proven.items()
    )
    if not (same and certificate.holds):
        raise CertificateViolation(f"{path}: its certificate does not hold for the weights there")


def download(name: str) -> Path:
    """The folder that a model of the Hub is kept in; raises CheckpointError if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no folder here, and the Hub cannot be reached "
            f"({one_line(error.__cause__ or error)})"
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{name}: no folder here, and no model on the Hub ({one_line(error)})"
        ) from None
