"""The card of an exported model: README.md beside its weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from invformer.evaluation.result import Evaluation
from invformer.nn.certificate import Certificate
from invformer.nn.transformer import CharTransformer
from invformer.report.table import certificate_sentences, headlines
from invformer.runs.checkpoint import WEIGHT_BITS

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


def model_card(
    network: CharTransformer,
    metadata: Mapping[str, Any],
    certificate: Certificate | None,
    evaluation: Evaluation | None,
    name: str,
) -> str:
    """README.md of the folder: what the model is, how good, what is proven, how to load it."""
    head: dict[str, Any] = {
        "license": "mit", "library_name": "invformer", "pipeline_tag": "text-generation",
        "tags": ["invertible", "lipschitz", "character-level"],
    }  # fmt: skip
    measured = "This model was exported without an evaluation."
    if evaluation:
        data, count = evaluation.data, evaluation.num_characters
        text = f"On the {data.split} split of {data.name}, {count:,}"
        measured = f"{text} characters:\n\n{bullets(headlines(evaluation))}"
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": data.name, "type": data.name, "split": data.split},
            "metrics": [{"type": "bits_per_character", "value": round(evaluation.bpc, 4)}],
        }
        head["model-index"] = [{"name": name, "results": [result]}]
    parameters, config = sum(p.numel() for p in network.parameters()), metadata["config"]
    return CARD_TEXT.format(
        front=yaml.safe_dump(head, sort_keys=False),
        kind=f"{config['model']['name']}, {parameters:,} parameters",
        context=config["data"]["seq_len"],
        training=bullets((key, metadata.get(key)) for key in ON_CARD),
        evaluation=measured,
        certificate="\n\n".join(certificate_sentences(certificate)),
        name=name,
    )


def bullets(facts: Iterable[tuple[str, Any]]) -> str:
    """A list in Markdown of the facts that are known."""
    return "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in facts if value)
