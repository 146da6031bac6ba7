"""A model as a folder to share, also on the Hub: a checkpoint without state, with a model card.

Loading such a folder compares every file with its SHA-256 and proves the certificate again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from invformer.errors import CertificateViolation, StorageError
from invformer.evaluation.report import certificate_sentences, headlines
from invformer.nn.certificate import certify
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import CARD, MODEL, PREFIX, WEIGHTS, write_directory
from invformer.runs.contained import one_line
from invformer.runs.encoding import dump, to_bytes
from invformer.runs.files import replace_file

if TYPE_CHECKING:
    from invformer.model import TrainedModel

PROVENANCE = ("step", "command", "commit", "data_source", "data_sha256")
KEPT = (*PROVENANCE, "config", "vocabulary", "versions")  # of a checkpoint's model.json
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
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty; name a new folder")
    proven = None if model.certificate is None else model.certificate.to_dict()
    metadata = {key: model.metadata.get(key) for key in KEPT} | {"certificate": proven}
    weights = {PREFIX + name: tensor for name, tensor in model.network.state_dict().items()}
    write_directory(folder, {MODEL: dump(metadata), WEIGHTS: to_bytes(weights)})
    replace_file(folder / CARD, model_card(model, proven, name or folder.name))


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


def prove_again(network: CharTransformer, claimed: dict[str, Any] | None, where: Path) -> None:
    """Certify the weights, and compare with the certificate beside them."""
    if claimed is None:
        return
    certificate = certify(network, dtype=getattr(torch, claimed["dtype"]))
    bounds = certificate.per_branch
    same = bounds.keys() == claimed["per_branch"].keys() and all(
        bound <= claimed["per_branch"][name] * (1 + ROUNDING) for name, bound in bounds.items()
    )
    if not (same and certificate.holds):
        raise CertificateViolation(f"{where}: its certificate does not hold for the weights there")


def model_card(model: "TrainedModel", certificate: dict[str, Any] | None, name: str) -> str:
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
        training=bullets((key, model.metadata.get(key)) for key in PROVENANCE),
        evaluation=evaluation,
        certificate="\n\n".join(certificate_sentences(certificate)),
        name=name,
    )


def bullets(facts: Iterable[tuple[str, Any]]) -> str:
    """A list in Markdown of the facts that are known."""
    return "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in facts if value)
