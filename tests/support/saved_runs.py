"""Checkpoints without the training: a model, written as a run would have saved it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from invformer.assemble.model import untrained
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.trained import EvaluateConfig
from invformer.data.corpora import read_corpus
from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.evaluate import evaluate
from invformer.evaluation.result import Evaluation
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import encode, write_directory
from invformer.trained.model import opened
from invformer.trained.opening import find_checkpoint

NO_STATE: dict[str, Any] = {
    "epoch": 0, "loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": [],
    "data": {},
}  # fmt: skip
SUMS, TEXT_FILE = "".join(f"{i} and {i} is {i + i}; " for i in range(300)), "sums.txt"


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


def evaluated(path: Path, *words: str) -> Evaluation:
    """The report of evaluate.py on a checkpoint, quick unless the words ask for more."""
    quick = ("evaluate.lipschitz_steps=2", "evaluate.inversion_sequences=1")
    config = load_config([f"checkpoint={path}", *quick, *words], EvaluateConfig)
    checkpoint = find_checkpoint(path)
    model = opened(checkpoint, "cpu")
    return evaluate(model.network, model.vocabulary, model.config, checkpoint, config)


class Saved:
    """A run on sums that was never trained: its model may be changed before it is written."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        (folder / TEXT_FILE).write_text(SUMS)
        small = ("data.seq_len=16", "model.d_model=16", "model.num_layers=1", "model.num_heads=2")
        text = ("data.name=text_file", f"data.path={folder / TEXT_FILE}")
        self.config: TrainConfig = load_config([*text, *small, *words])
        corpus = read_corpus(self.config.data)
        self.sha256 = corpus.sha256
        self.vocabulary = Vocabulary.from_text(corpus.read("train"))
        torch.manual_seed(0)
        self.model: CharTransformer = untrained(self.config, self.vocabulary.size)

    def save(self, step: int = 3) -> Path:
        return save_run(self.folder, self.config, self.vocabulary, self.model, step, self.sha256)

    def evaluated(self, *words: str) -> Evaluation:
        return evaluated(self.save(), *words)
