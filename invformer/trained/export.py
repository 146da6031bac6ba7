"""A trained model as a folder to share: a checkpoint without a state, with a card.

Nothing in it names a person, a machine or a run of W&B, but the text's path, which the user typed.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from invformer.config.load import command_line, from_dict
from invformer.config.schema import TrainConfig
from invformer.errors import StorageError, one_line
from invformer.evaluation.result import Evaluation
from invformer.nn.certificate import Certificate
from invformer.nn.transformer import CharTransformer
from invformer.report.card import model_card
from invformer.runs import encoding
from invformer.runs.checkpoint import MANIFEST, MODEL, PREFIX, WEIGHT_BITS, WEIGHTS, manifest_of
from invformer.runs.files import UNFINISHED_EXPORT, require_new_folder
from invformer.runs.packed import Rounded, packed

CARD = "README.md"
# What may be shared of the metadata and of the configuration, beside the seed.
SHARED = (
    "step", "commit", "vocabulary", "data_source", "data_sha256", "versions", "changes",
    WEIGHT_BITS,
)  # fmt: skip
SHARED_SECTIONS = ("init_from", "model", "data", "optim", "trainer")


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
