"""From a checkpoint to an evaluation report."""

from pathlib import Path
from typing import Any

from invformer.assemble.saved_model import load_model, trained_configuration
from invformer.config.schema import EvaluateConfig
from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.evaluation.evaluate import evaluate
from invformer.runs.machine import pick_device


def evaluate_checkpoint(config: EvaluateConfig) -> tuple[dict[str, Any], Path]:
    """Load a model and measure everything that is asked for.

    Returns:
        The report, and the file that holds the latest one of the run.
    """
    checkpoint = read_checkpoint(config.checkpoint)
    trained = trained_configuration(checkpoint)
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    device = pick_device(config.evaluate.device, "evaluate.device")
    model = load_model(checkpoint, trained, vocabulary).to(device)
    report = evaluate(model, vocabulary, trained, checkpoint, config)
    return report, checkpoint.evaluation
