"""A resumed run sees exactly the batches an uninterrupted one sees; short text is refused."""

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from invformer.config.load import load_config
from invformer.data.corpus import Corpus
from invformer.data.datamodule import TextDataModule
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError
from invformer.training.build import build_data
from tests.data.texts import write
from tests.support.small_runs import own_trainer

pytestmark = [  # Lightning's calls into PyTorch, and its advice
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]
SEQ_LEN = 8


def make_corpus(train: str, val: str, test: str = "") -> Corpus:
    return Corpus.of_texts("made_up", "a test", train, val, test)


CORPUS = make_corpus("the quick brown fox jumps over the lazy dog. " * 9, "over the dog. " * 5)


def make_data(corpus: Corpus = CORPUS, **options: Any) -> TextDataModule:
    options = {"seq_len": SEQ_LEN, "batch_size": 4, "eval_batch_size": 3, "seed": 5} | options
    return TextDataModule(corpus, Vocabulary.from_text(corpus.read("train")), **options)


class Recorder(L.LightningModule):
    """Trains one weight, and remembers the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches: list[list] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch[0].tolist())
        return self.weight.square()

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def saving_trainer(folder: Path, every: int, **options: Any) -> L.Trainer:
    keeper = ModelCheckpoint(folder, "saved", every_n_train_steps=every)
    return own_trainer(keeper, enable_checkpointing=True, num_sanity_val_steps=0, **options)


def test_lightnings_own_trainer_and_checkpoints_continue_at_the_next_batch(tmp_path) -> None:
    def batches(max_steps: int, checkpoint: Path | None = None) -> list[list]:
        module = Recorder()
        trainer = saving_trainer(tmp_path, 5, max_steps=max_steps, accumulate_grad_batches=2)
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
        return module.batches

    first = batches(5)
    assert first + batches(9, tmp_path / "saved.ckpt") == batches(9)


@pytest.mark.filterwarnings("ignore:You're resuming")
def test_a_run_of_several_short_epochs_is_continued_to_its_end(tmp_path) -> None:
    def num_steps(checkpoint: Path | None = None) -> int:
        trainer = saving_trainer(tmp_path, 12, max_epochs=4, limit_train_batches=5)
        trainer.fit(Recorder(), make_data(), ckpt_path=checkpoint, weights_only=True)
        return trainer.global_step

    assert num_steps() == 20
    assert num_steps(tmp_path / "saved.ckpt") == 20


def test_the_state_is_plain_and_survives_without_a_trainer() -> None:
    data = make_data()
    data.load_state_dict({"next_batch": 10, "global_step": 5, "windows_per_batch": 8})
    assert data.state_dict() == {"next_batch": 10, "global_step": 5, "windows_per_batch": 8}
    inputs, _ = next(iter(data.train_dataloader()))
    expected = next(itertools.islice(make_data().train_dataloader(), 20, None))[0]
    assert torch.equal(inputs, expected)


def test_every_loader_reads_its_own_split_with_trainings_vocabulary(tmp_path) -> None:
    (tmp_path / "train.txt").write_text("ab" * 20)
    (tmp_path / "valid.txt").write_text("cd" * 20)
    words = ["data=text_file", f"data.path={tmp_path}", "data.seq_len=8"]
    data = build_data(load_config(words))
    assert data.vocabulary.symbols[1:] == ("a", "b")
    assert next(iter(data.train_dataloader()))[0].unique().tolist() == [1, 2]
    assert next(iter(data.val_dataloader()))[0].unique().tolist() == [0]


def test_the_probe_is_the_beginning_of_a_split_and_the_first_batch_what_training_sees() -> None:
    data = make_data()
    probe = data.first_windows("val", 3)
    assert probe.dtype == torch.int64
    assert data.vocabulary.decode(probe.flatten()) == CORPUS.split("val")[: 3 * SEQ_LEN]
    assert data.first_windows("val", 10**6).shape == (len(CORPUS.split("val")) // SEQ_LEN, SEQ_LEN)
    assert torch.equal(data.first_batch()[0], next(iter(data.train_dataloader()))[0])


@pytest.mark.parametrize(
    ("train", "val", "match"),
    [
        (SEQ_LEN, 20, r"train split has 8 characters, fewer than data\.seq_len \+ 1 = 9"),
        (20, SEQ_LEN, r"val split has 8 .*20 \(train\), 8 \(val\), 0 \(test\) characters"),
        (20, 0, "no val text"),
    ],
)
def test_a_split_shorter_than_a_window_is_refused(train: int, val: int, match: str) -> None:
    with pytest.raises(DataError, match=match):
        make_data(make_corpus("a" * train, "a" * val))
    make_data(make_corpus("a" * (SEQ_LEN + 1), "a" * (SEQ_LEN + 1)))


@pytest.mark.parametrize("num_characters", [40, 41, 299, 300, 700, 2600, 2601])
@pytest.mark.parametrize(
    "words",
    [(), ("data.max_val_characters=5",), ("data.max_characters=250",), ("data.vocabulary=bytes",)],
)
def test_what_a_refusal_names_works(tmp_path, num_characters: int, words: tuple[str, ...]) -> None:
    path = write(tmp_path / "t.txt", ("naïve text. " * num_characters)[:num_characters])
    words = ("data=text_file", f"data.path={path}", *words)
    for _ in range(3):  # the validation split may be too short for two reasons
        try:
            build_data(load_config(words))
            return
        except DataError as error:
            words += tuple(re.findall(r"data\.\w+=[0-9.]+", str(error).split("); ")[1]))
    pytest.fail(" ".join(words))


def test_unknown_characters_are_counted_and_reported(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        data = make_data(make_corpus("abcd" * 5, "abcdéabcdèabcd?abcd?"))
    assert data.tokens("val").tolist() == [1, 2, 3, 4, 0] * 4
    assert "20 % of the validation text is not in the vocabulary" in caplog.text
