"""Trained models as folders to share, also on the Hub: written with a card, opened with a proof.

A folder is opened only if every file has its SHA-256, and its certificate is proven again.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors.torch
import torch
import yaml

from invformer.assemble.model import untrained
from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CertificateViolation, CheckpointError, StorageError
from invformer.evaluation.report import certificate_sentences, headlines
from invformer.nn.proof import certify
from invformer.nn.quantised import packed, quantised, unpacked
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import Checkpoint, checked_metadata
from invformer.runs.contained import one_line
from invformer.runs.files import UNFINISHED_EXPORT, require_new_folder

if TYPE_CHECKING:
    from invformer.model import TrainedModel

WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "vocabulary.json"
CERTIFICATE, MANIFEST, CARD = "certificate.json", "manifest.json", "README.md"
HASHED = (WEIGHTS, CONFIG, VOCABULARY, CERTIFICATE)
FORMAT = "invformer-model-1"
WEIGHT_BITS = "weight_bits"  # in the configuration, if matrices are rounded to so many
KEPT = ("step", "command", "commit", "data_source", "data_sha256", WEIGHT_BITS)
ROUNDING = 1e-9  # relative, between the float64 arithmetic of two machines
CARD_TEXT = """---
{front}---

# invformer model

A character-level Transformer ({kind}, context {context} characters), trained by invformer. It
predicts the next character of a text and is no assistant.

{training}

## Evaluation

{evaluation}

## Certificate

{certificate}

## Use

```python
import invformer

model = invformer.load({name!r})  # proves the certificate again
print(model.generate("The ", length=200))
```
"""


class Trained(NamedTuple):
    """A trained model, in eval mode, and what belongs to it."""

    model: CharTransformer
    vocabulary: Vocabulary
    config: TrainConfig
    checkpoint: Checkpoint


def write_export(folder: Path, model: "TrainedModel", name: str | None, bits: int | None) -> None:
    """Write the folder as :meth:`.TrainedModel.export` says; with ``bits`` without evaluation."""
    matrices = {}
    if bits is not None:
        network, matrices = quantised(model.network, bits)
        metadata = model.metadata | {WEIGHT_BITS: bits}
        model = replace(model, network=network, metadata=metadata, evaluation=None)
    proven = None if model.certificate is None else model.certificate.to_dict()
    training = {key: model.metadata.get(key) for key in KEPT}
    weights = {n: w for n, w in model.network.state_dict().items() if n not in matrices}
    weights |= packed(matrices)
    files = {
        WEIGHTS: safetensors.torch.save({n: w.contiguous() for n, w in weights.items()}),
        CONFIG: as_json({"config": asdict(model.config), "training": training}),
        VOCABULARY: as_json(model.vocabulary.to_dict()),
        CERTIFICATE: as_json(proven),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files[CARD] = model_card(model, training, proven, name or folder.name).encode()
    manifest = folder / UNFINISHED_EXPORT
    require_new_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write_bytes(as_json({"format": FORMAT, "sha256": hashes}))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        manifest.rename(folder / MANIFEST)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def read_export(folder: Path, name: Path) -> Trained:
    """An exported model, as a checkpoint without a state; its evaluations lie beside ``name``."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: the format {manifest['format']!r:.40} is not known")
        files = {file: (folder / file).read_bytes() for file in HASHED}
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
        weights = safetensors.torch.load(files[WEIGHTS])
        if bits := about["training"].get(WEIGHT_BITS):
            weights = unpacked(weights, model.state_dict(), bits)
        model.load_state_dict(weights)
        claimed = json.loads(files[CERTIFICATE])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: no exported model ({one_line(error)})") from None
    prove_again(model.eval(), claimed, folder)
    return Trained(model, vocabulary, config, checkpoint)


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


def as_json(value: Any) -> bytes:
    """Readable JSON in UTF-8."""
    return (json.dumps(value, indent=2) + "\n").encode()


def model_card(
    model: "TrainedModel", training: dict[str, Any], certificate: dict[str, Any] | None, name: str
) -> str:
    """README.md of the folder: what the model is, how good, what is proven, how to load it."""
    head: dict[str, Any] = {
        "license": "mit", "library_name": "invformer", "pipeline_tag": "text-generation",
        "tags": ["invertible", "lipschitz", "character-level"],
    }  # fmt: skip
    evaluation = "This model was exported without an evaluation."
    if report := model.evaluation:
        data = report["data"]
        text = f"On the {data['split']} split of {data['name']}, {report['num_characters']:,}"
        evaluation = f"{text} characters:\n\n{bullets(headlines(report))}"
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": data["name"], "type": data["name"], "split": data["split"]},
            "metrics": [{"type": "bits_per_character", "value": round(report["bpc"], 4)}],
        }
        head["model-index"] = [{"name": name, "results": [result]}]
    parameters = sum(p.numel() for p in model.network.parameters())
    return CARD_TEXT.format(
        front=yaml.safe_dump(head, sort_keys=False),
        kind=f"{model.config.model.name}, {parameters:,} parameters",
        context=model.config.data.seq_len,
        training=bullets(training.items()),
        evaluation=evaluation,
        certificate="\n\n".join(certificate_sentences(certificate)),
        name=name,
    )


def bullets(facts: Iterable[tuple[str, Any]]) -> str:
    """A list in Markdown of the facts that are known."""
    return "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in facts if value)


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
