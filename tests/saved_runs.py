"""Checkpoints without the training: a model, written as a run would have saved it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from invformer.assemble.trained import load_trained
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.trained import EvaluateConfig
from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.evaluate import evaluate
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import encode, write_directory

NO_STATE: dict[str, Any] = {
    "epoch": 0, "loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": [],
    "data": {},
}  # fmt: skip


def write_checkpoint(path: Path, metadata: dict, weights: dict, state: dict) -> None:
    """A checkpoint as one process writes it."""
    write_directory(path, encode(metadata, weights, state))


def save_run(
    folder: Path,
    config: TrainConfig,
    vocabulary: Vocabulary,
    model: CharTransformer,
    step: int = 3,
    data_sha256: str = "0",
) -> Path:
    """Write a run's one checkpoint; returns its directory."""
    metadata = {
        "config": asdict(config), "vocabulary": vocabulary.to_dict(), "data_sha256": data_sha256,
        "step": step,
    }  # fmt: skip
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    path = folder / "checkpoints" / f"step-{step:08d}"
    write_checkpoint(path, metadata, weights, NO_STATE)
    return path


def evaluated(path: Path, *words: str) -> dict[str, Any]:
    """The report of evaluate.py on a checkpoint."""
    config = load_config([f"checkpoint={path}", *words], EvaluateConfig)
    return evaluate(*load_trained(str(path)), config)
