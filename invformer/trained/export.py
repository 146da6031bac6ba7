"""A trained model as a folder to share: a checkpoint without a state, with a card.

Nothing in it names a person, a machine or a run of W&B, but the text's path, which the user typed.
Its matrices may be integers of few bits, with one scale for each output channel. A certified layer
divides by a bound on the norm of the matrix it is given, so the certificate is proven for the
rounded matrices. Vectors, scalings and positions stay as they are.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invformer.config.load import command_line, from_dict
from invformer.config.schema import TrainConfig
from invformer.errors import ConfigurationError, StorageError, one_line
from invformer.evaluation.result import Evaluation
from invformer.nn.certificate import Certificate
from invformer.nn.transformer import CharTransformer
from invformer.report.card import model_card
from invformer.runs import encoding
from invformer.runs.checkpoint import MANIFEST, MODEL, PREFIX, WEIGHT_BITS, WEIGHTS, manifest_of
from invformer.runs.files import UNFINISHED_EXPORT, require_new_folder
from invformer.runs.packed import BITS, Rounded, packed

CARD = "README.md"
NUM_SCALES = 40  # tried for a channel
# What may be shared of the metadata and of the configuration, beside the seed.
SHARED = (
    "step", "commit", "vocabulary", "data_source", "data_sha256", "versions", "changes",
    WEIGHT_BITS,
)  # fmt: skip
SHARED_SECTIONS = ("init_from", "model", "data", "optim", "trainer")

# In names of parameters that are not rounded: scalings, temperatures, and positions.
KEPT = ("log_", "position")


def shared(metadata: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """What may be shared of a model's metadata."""
    kept = {key: metadata[key] for key in SHARED if key in metadata}
    values = asdict(config)
    sections = {name: values[name] for name in SHARED_SECTIONS} | {"run": {"seed": config.run.seed}}
    return {**kept, "config": sections, "command": command_line(from_dict(sections))}


def write_export(
    folder: Path,
    network: CharTransformer,
    metadata: dict[str, Any],
    certificate: Certificate | None,
    evaluation: Evaluation | None,
    name: str | None,
    matrices: Mapping[str, Rounded],
) -> None:
    """Write a folder as :meth:`.TrainedModel.export` says.

    ``metadata`` are those of :func:`shared`; ``matrices`` the rounded ones.
    """
    weights = network.state_dict()
    weights = {n: w for n, w in weights.items() if n not in matrices} | packed(matrices)
    files = {
        MODEL: encoding.dump(metadata | {"certificate": certificate and certificate.to_dict()}),
        WEIGHTS: encoding.to_bytes({PREFIX + n: w for n, w in weights.items()}),
    }
    manifest = manifest_of(files)
    card = model_card(network, metadata, certificate, evaluation, name or folder.name)
    files[CARD] = card.encode()
    require_new_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED_EXPORT).write_bytes(manifest)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        (folder / UNFINISHED_EXPORT).rename(folder / MANIFEST)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def rounded(weight: Tensor, bits: int, input_dim: int) -> Rounded:
    """The nearest of 2^bits − 1 levels around zero, with the scales of least squared error.

    A scale is shared along ``input_dim``: every output channel has its own.
    """
    max_integer = 2 ** (bits - 1) - 1
    max_weight = weight.abs().amax(input_dim, keepdim=True)
    integers, scales = torch.zeros_like(weight), torch.zeros_like(max_weight)
    least_error = torch.full_like(max_weight, math.inf)
    for shrink in torch.linspace(1, 0.3, NUM_SCALES).tolist():
        scale = (max_weight * shrink / max_integer).half().to(weight)
        tried = (weight / scale).nan_to_num(0)  # 0/0 in a row of zeros
        tried = tried.round().clamp(-max_integer, max_integer)
        error = (tried * scale - weight).square().sum(input_dim, keepdim=True)
        is_better = error < least_error
        integers = torch.where(is_better, tried, integers)
        scales = torch.where(is_better, scale, scales)
        least_error = torch.minimum(error, least_error)
    return Rounded(integers.to(torch.int8), scales.half(), bits)


@torch.no_grad()
def quantised(model: CharTransformer, bits: int) -> tuple[CharTransformer, dict[str, Rounded]]:
    """A copy of the model with rounded matrices, and these by the names of its parameters."""
    if bits not in BITS:
        raise ConfigurationError(f"bits: {bits} is not in [{BITS[0]}, {BITS[-1]}]")
    model, matrices = copy.deepcopy(model), {}
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or any(word in name for word in KEPT):
            continue
        is_ours = model.is_invertible and name.startswith("stack")
        input_dim = -2 if is_ours else -1  # our branches compute x W, nn.Linear computes x Wᵀ
        matrices[name] = rounded(weight, bits, input_dim)
        weight.copy_(matrices[name].value())
    return model, matrices


def upload(folder: Path, name: str) -> str:
    """Upload a folder to the Hub, with the token of ``hf auth login``; its address there.

    Raises:
        StorageError: the Hub does not take it.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # which ones differs between releases
        raise StorageError(f"{name}: the Hub does not take it ({one_line(error)})") from None
    return str(address)
