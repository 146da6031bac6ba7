"""Opening a trained model: of a run, of one checkpoint, of an exported folder, or of the Hub.

An exported folder is opened only if every file has its SHA-256, and its certificate is proven
again.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from invformer.assemble.model import build_model
from invformer.config.schema import TrainConfig
from invformer.config.trained import is_hub_name
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CertificateViolation, CheckpointError
from invformer.nn.proof import certify
from invformer.nn.quantised import unpacked
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import PREFIX, Checkpoint, checked_metadata, read_checkpoint
from invformer.runs.contained import one_line

FIRST_BLOCK = "stack.blocks.0."
EXPORTED_WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "vocabulary.json"
CERTIFICATE, MANIFEST = "certificate.json", "manifest.json"
EXPORTED = (EXPORTED_WEIGHTS, CONFIG, VOCABULARY, CERTIFICATE)
FORMAT = "invformer-model-1"
WEIGHT_BITS = "weight_bits"  # in the configuration, if matrices are rounded to so many
ROUNDING = 1e-9  # relative, between the float64 arithmetic of two machines


class Trained(NamedTuple):
    """A trained model, in eval mode, and what belongs to it."""

    model: CharTransformer
    vocabulary: Vocabulary
    config: TrainConfig
    checkpoint: Checkpoint


def load_trained(source: str) -> Trained:
    """The model of a run folder, of one checkpoint in it, of an exported folder, or of the Hub.

    Raises:
        CheckpointError: there is none, or it is damaged.
        CertificateViolation: an exported model does not have the certificate beside it.
    """
    folder = Path(os.path.expanduser(source))
    if is_hub_name(source):
        return read_export(download(source), Path(source.replace("/", "--")))
    if (folder / EXPORTED_WEIGHTS).is_file():
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


def untrained(config: TrainConfig, vocab_size: int) -> CharTransformer:
    """The model as training began with it, in the precision that its weights are kept in."""
    model = build_model(config.model, vocab_size, config.data.seq_len)
    return model.to(torch.float64 if config.trainer.precision == "64-true" else torch.float32)


def read_export(folder: Path, name: Path) -> Trained:
    """An exported model, as a checkpoint without a state; its evaluations lie beside ``name``.

    Raises:
        CheckpointError: a file is missing, was changed, or does not fit the others.
        CertificateViolation: the weights do not have the certificate that lies beside them.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: the format {manifest['format']!r:.40} is not known")
        if set(manifest["sha256"]) != set(EXPORTED):
            raise CheckpointError(f"{folder / MANIFEST}: lists other files than an export has")
        files = {file: (folder / file).read_bytes() for file in EXPORTED}
        for file, content in files.items():
            if hashlib.sha256(content).hexdigest() != manifest["sha256"][file]:
                raise CheckpointError(f"{folder / file}: was changed since it was exported")
        about = json.loads(files[CONFIG])
        metadata = {
            **about["training"],
            "config": about["config"],
            "vocabulary": json.loads(files[VOCABULARY]),
        }
        checkpoint = Checkpoint(name, {}, "", checked_metadata(metadata, folder / CONFIG))
        config = checkpoint.configuration(monitor={})
        vocabulary = Vocabulary.from_dict(metadata["vocabulary"])
        model = untrained(config, vocabulary.size)
        weights = safetensors.torch.load(files[EXPORTED_WEIGHTS])
        if bits := about["training"].get(WEIGHT_BITS):
            weights = unpacked(weights, model.state_dict(), bits)
        model.load_state_dict(weights)
        claimed = json.loads(files[CERTIFICATE])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: no exported model ({one_line(error)})") from None
    prove_again(model.eval(), claimed, folder)
    return Trained(model, vocabulary, config, checkpoint)


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


def prove_again(network: CharTransformer, claimed: dict[str, Any] | None, folder: Path) -> None:
    """Certify the weights, and compare with the certificate in the folder."""
    if claimed is None:
        return
    certificate = certify(network, dtype=getattr(torch, claimed["dtype"]))
    bounds = certificate.per_branch
    same = bounds.keys() == claimed["per_branch"].keys() and all(
        bound <= claimed["per_branch"][name] * (1 + ROUNDING) for name, bound in bounds.items()
    )
    if not (same and certificate.holds):
        raise CertificateViolation(f"{folder / CERTIFICATE}: does not hold for the weights there")
