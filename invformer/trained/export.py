"""A trained model as a folder to share: a checkpoint without a state, with a card.

Nothing in it names a person, a machine or a run of W&B, but the text's path, which the user typed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from invformer.config.load import command_line, from_dict
from invformer.config.schema import TrainConfig
from invformer.errors import StorageError
from invformer.evaluation.report import certificate_sentences, headlines
from invformer.nn.quantised import Rounded, packed
from invformer.nn.transformer import CharTransformer
from invformer.processes.contained import one_line
from invformer.runs import encoding
from invformer.runs.checkpoint import MANIFEST, MODEL, PREFIX, WEIGHT_BITS, WEIGHTS, record_of
from invformer.runs.files import UNFINISHED_EXPORT, require_new_folder
from invformer.runs.writing import manifest_of

CARD = "README.md"
# What may be shared of the metadata and of the configuration, beside the seed.
SHARED = (
    "step", "commit", "vocabulary", "data_source", "data_sha256", "versions", "changes",
    WEIGHT_BITS,
)  # fmt: skip
SHARED_SECTIONS = ("init_from", "model", "data", "optim", "trainer")
ON_CARD = ("step", "command", "commit", "data_source", "data_sha256", WEIGHT_BITS)
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
    evaluation: Mapping[str, Any] | None,
    name: str | None,
    matrices: Mapping[str, Rounded],
) -> None:
    """Write a folder as :meth:`.TrainedModel.export` says.

    ``metadata`` are those of :func:`shared`, with a certificate; ``matrices`` the rounded ones.
    """
    weights = network.state_dict()
    weights = {n: w for n, w in weights.items() if n not in matrices} | packed(matrices)
    files = {
        MODEL: encoding.dump(metadata),
        WEIGHTS: encoding.to_bytes({PREFIX + n: w for n, w in weights.items()}),
    }
    manifest = manifest_of({name: record_of(content) for name, content in files.items()})
    files[CARD] = model_card(network, metadata, evaluation, name or folder.name).encode()
    require_new_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED_EXPORT).write_bytes(manifest)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        (folder / UNFINISHED_EXPORT).rename(folder / MANIFEST)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def model_card(
    network: CharTransformer,
    metadata: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None,
    name: str,
) -> str:
    """README.md of the folder: what the model is, how good, what is proven, how to load it."""
    head: dict[str, Any] = {
        "license": "mit", "library_name": "invformer", "pipeline_tag": "text-generation",
        "tags": ["invertible", "lipschitz", "character-level"],
    }  # fmt: skip
    measured = "This model was exported without an evaluation."
    if evaluation:
        data = evaluation["data"]
        text = f"On the {data['split']} split of {data['name']}, {evaluation['num_characters']:,}"
        measured = f"{text} characters:\n\n{bullets(headlines(evaluation))}"
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": data["name"], "type": data["name"], "split": data["split"]},
            "metrics": [{"type": "bits_per_character", "value": round(evaluation["bpc"], 4)}],
        }
        head["model-index"] = [{"name": name, "results": [result]}]
    parameters, config = sum(p.numel() for p in network.parameters()), metadata["config"]
    return CARD_TEXT.format(
        front=yaml.safe_dump(head, sort_keys=False),
        kind=f"{config['model']['name']}, {parameters:,} parameters",
        context=config["data"]["seq_len"],
        training=bullets((key, metadata.get(key)) for key in ON_CARD),
        evaluation=measured,
        certificate="\n\n".join(certificate_sentences(metadata["certificate"])),
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
