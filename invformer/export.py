"""A model as a folder to share, also on the Hub: weights, vocabulary, certificate, model card.

Loading such a folder compares every file with its SHA-256 and proves the certificate again.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import yaml

from invformer.assemble.model import build_model
from invformer.config import from_dict, to_dict
from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CertificateViolation, CheckpointError, ConfigurationError, StorageError
from invformer.evaluation.report import certificate_sentences, headlines
from invformer.nn.certificate import certify
from invformer.nn.transformer import CharTransformer
from invformer.runs.contained import one_line

if TYPE_CHECKING:
    from invformer.model import TrainedModel

WEIGHTS, CONFIG, VOCABULARY = "model.safetensors", "config.json", "vocabulary.json"
CERTIFICATE, MANIFEST, CARD = "certificate.json", "manifest.json", "README.md"
FORMAT = "invformer-model-1"
KEPT = ("step", "command", "commit", "data_source", "data_sha256")
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


def write_export(folder: Path, model: "TrainedModel", name: str | None) -> None:
    """Write the folder, which must not exist yet or be empty.

    ``name`` is what the model card loads it by; None for the folder's own name.

    Raises:
        StorageError: it holds something, or cannot be written.
    """
    proven = None if model.certificate is None else model.certificate.to_dict()
    training = {key: model.metadata.get(key) for key in KEPT}
    weights = {name: tensor.contiguous() for name, tensor in model.network.state_dict().items()}
    files = {
        WEIGHTS: safetensors.torch.save(weights),
        CONFIG: as_json({"config": to_dict(model.config), "training": training}),
        VOCABULARY: as_json(model.vocabulary.to_dict()),
        CERTIFICATE: as_json(proven),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files[MANIFEST] = as_json({"format": FORMAT, "sha256": hashes})
    files[CARD] = model_card(model, training, proven, name or folder.name).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StorageError(f"{folder} is not empty; name a new folder")
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def as_json(value: Any) -> bytes:
    """Readable JSON in UTF-8."""
    return (json.dumps(value, indent=2) + "\n").encode()


def read_export(folder: Path) -> tuple[CharTransformer, Vocabulary, TrainConfig, dict[str, Any]]:
    """Network, vocabulary, configuration and provenance from an exported folder.

    Raises:
        CheckpointError: a file is missing, was changed, or does not fit the others.
        CertificateViolation: the weights do not have the certificate that lies beside them.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: the format {manifest['format']!r:.40} is not known")
        files = {name: (folder / name).read_bytes() for name in manifest["sha256"]}
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                raise CheckpointError(f"{folder / name}: was changed since it was exported")
        about = json.loads(files[CONFIG])
        config = from_dict(about["config"])
        vocabulary = Vocabulary.from_dict(json.loads(files[VOCABULARY]))
        network = build_model(config.model, vocabulary.size, config.data.seq_len)
        weights = safetensors.torch.load(files[WEIGHTS])
        network.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        claimed = json.loads(files[CERTIFICATE])
    except ConfigurationError as error:
        raise CheckpointError(f"{folder}: its configuration is invalid ({error})") from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: no exported model ({one_line(error)})") from None
    prove_again(network.eval(), claimed, folder)
    return network, vocabulary, config, about["training"]


def upload(folder: Path, name: str) -> str:
    """Upload an exported folder to the Hub, with the token of ``hf auth login``; its address.

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
    """The folder that a model on the Hub is kept in, which is downloaded if it is not there yet.

    Raises:
        CheckpointError: there is no such model on the Hub, and no such folder here.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
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


def model_card(
    model: "TrainedModel",
    training: dict[str, Any],
    certificate: dict[str, Any] | None,
    name: str,
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
