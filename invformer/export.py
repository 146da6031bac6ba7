"""Write a model as a folder to share, also on the Hub, which :mod:`.assemble.trained` opens."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import yaml

from invformer.assemble.trained import (
    CERTIFICATE,
    CONFIG,
    EXPORTED_WEIGHTS,
    FORMAT,
    MANIFEST,
    VOCABULARY,
    WEIGHT_BITS,
)
from invformer.errors import StorageError
from invformer.evaluation.report import certificate_sentences, headlines
from invformer.nn.quantised import packed, quantised
from invformer.runs.contained import one_line

if TYPE_CHECKING:
    from invformer.model import TrainedModel

CARD = "README.md"
KEPT = ("step", "command", "commit", "data_source", "data_sha256", WEIGHT_BITS)
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
        EXPORTED_WEIGHTS: safetensors.torch.save({n: w.contiguous() for n, w in weights.items()}),
        CONFIG: as_json({"config": asdict(model.config), "training": training}),
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
