"""Every character is used equally in training, also if it is resumed, and predicted once."""

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from invformer.config.load import load_config
from invformer.data.corpus import Corpus
from invformer.data.datamodule import TextDataModule
from invformer.data.vocabulary import Vocabulary
from invformer.data.windows import EvaluationWindows, TrainingWindows
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


def test_a_training_batch_depends_on_seed_and_step_alone() -> None:
    tokens = torch.arange(1000)
    steps = [TrainingWindows(tokens, 8, 4, seed=1).batch(i)[0] for i in range(50)]
    for i in (49, 0, 23):
        assert torch.equal(TrainingWindows(tokens, 8, 4, seed=1).batch(i)[0], steps[i])
    assert not torch.equal(TrainingWindows(tokens, 8, 4, seed=2).batch(0)[0], steps[0])
    assert len({tuple(s.flatten().tolist()) for s in steps}) == 50


@pytest.mark.parametrize("n", [8, 9, 23, 64])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_in_an_epoch_no_character_is_a_target_twice(n: int, batch_size: int) -> None:
    seq_len = 8
    per_epoch = n // seq_len
    batches = itertools.islice(
        TrainingWindows(torch.arange(n), seq_len, batch_size, seed=0), 40 * per_epoch
    )
    windows = torch.cat([targets for _, targets in batches])[: 40 * per_epoch]
    for epoch in windows.split(per_epoch):
        assert len(epoch.unique()) == per_epoch * seq_len
    assert len(windows.unique()) == n


def test_over_many_epochs_every_character_is_used_equally_often() -> None:
    n, seq_len, epochs = 23, 5, 4000
    tokens = torch.arange(n)
    targets = TrainingWindows(tokens, seq_len, epochs * (n // seq_len), seed=0).batch(0)[1]
    used = targets.flatten().bincount(minlength=n)
    share = (n - n % seq_len) / n
    deviation = (epochs * share * (1 - share)) ** 0.5
    assert (used - epochs * share).abs().max() < 5 * deviation


@pytest.mark.parametrize("n", [9, 40])
def test_a_target_is_the_character_after_its_input_on_the_ring(n: int) -> None:
    tokens = torch.arange(n).to(torch.uint16)  # narrow, as they are in memory
    inputs, targets = TrainingWindows(tokens, 8, 100, seed=0).batch(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % n)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_side_by_side_see_the_batch_of_one_process(world_size: int) -> None:
    tokens = torch.arange(100)
    for step in range(20):
        whole = TrainingWindows(tokens, 8, 6, seed=0).batch(step)
        shares = [
            TrainingWindows(tokens, 8, 6 // world_size, 0, 0, rank, world_size).batch(step)
            for rank in range(world_size)
        ]
        for i in range(2):
            assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


@settings(deadline=None)
@given(st.data())
def test_evaluation_predicts_all_but_the_first_character_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 60))
    seq_len = data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(1, seq_len))
    batch_size = data.draw(st.integers(1, 9))
    world_size = data.draw(st.integers(1, 3))
    scored_positions = []
    lengths = set()
    for rank in range(world_size):
        windows = EvaluationWindows(
            torch.arange(n), seq_len, stride, batch_size, rank=rank, world_size=world_size
        )
        lengths |= {len(windows), len(list(windows))}
        for inputs, targets, scored in windows:
            assert len(inputs) <= batch_size
            rows, columns = scored.nonzero(as_tuple=True)
            target = targets[scored]
            scored_positions += target.tolist()
            assert torch.equal(inputs[scored], target - 1)
            # What a character is predicted from: as much of the text as the stride promises.
            assert torch.equal(inputs[rows, 0], target - 1 - columns)
            assert (columns + 1 >= target.clamp(max=seq_len - stride + 1)).all()
    assert sorted(scored_positions) == list(range(1, n))
    assert len(lengths) == 1  # the same number of batches for every process
