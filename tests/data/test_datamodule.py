"""A resumed run sees exactly the batches an uninterrupted one sees; short text is refused."""

import itertools
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from invformer.assemble.run import build_data
from invformer.config import load_config
from invformer.data.corpus import Corpus
from invformer.data.datamodule import TextDataModule
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError, DataError

# Lightning's own calls into PyTorch, and its remark about the run directory of the fixture.
pytestmark = [
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


# --- Resuming ------------------------------------------------------------------------------------


class Recorder(L.LightningModule):
    """Learns, and remembers which batch belonged to which step."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocab_size, 6)
        self.head = torch.nn.Linear(6, vocab_size)
        self.batches: list[tuple[int, list]] = []
        self.validated_at: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.batches.append((self.trainer.global_step, inputs.tolist()))
        logits = self.head(self.embedding(inputs))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.validated_at.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    folder: Path,
    max_steps: int,
    *,
    accumulate: int = 2,
    save_every: int | None = None,
    resume: bool = False,
    **options: Any,
) -> Recorder:
    """Train with validation in between, saving every so many steps or at every validation."""
    data = make_data(**options)
    module = Recorder(data.vocabulary.size)
    trainer = L.Trainer(
        max_steps=max_steps, accumulate_grad_batches=accumulate, val_check_interval=6,
        check_val_every_n_epoch=None, accelerator="cpu", logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(
                folder, "last", every_n_train_steps=save_every, enable_version_counter=False
            )
        ],
    )  # fmt: skip
    checkpoint = str(folder / "last.ckpt") if resume else None
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return module


@pytest.mark.parametrize(
    ("max_steps", "save_every", "accumulate", "saved_step"),
    [
        pytest.param(5, 5, 2, 5, id="saved after a training step"),
        pytest.param(7, None, 2, 6, id="saved after a validation"),
        pytest.param(6, 3, 2, 6, id="extended after it was finished"),
        pytest.param(5, 5, 1, 5, id="without accumulation"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, max_steps: int, save_every: int | None, accumulate: int, saved_step: int
) -> None:
    how: dict[str, Any] = {"save_every": save_every, "accumulate": accumulate}
    reference = train(tmp_path / "whole", 12, accumulate=accumulate)
    first = train(tmp_path / "parts", max_steps, **how)
    checkpoint = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == saved_step
    assert checkpoint["TextDataModule"]["next_batch"] == saved_step * accumulate
    second = train(tmp_path / "parts", 12, resume=True, **how)
    completed = [batch for batch in first.batches if batch[0] < saved_step]
    assert completed + second.batches == reference.batches
    validated = [step for step in first.validated_at if step <= saved_step]
    assert sorted({*validated, *second.validated_at}) == reference.validated_at
    for name, weight in reference.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight), name


def test_another_batch_size_continues_at_the_same_window(tmp_path: Path) -> None:
    reference = train(tmp_path / "whole", 12, accumulate=1)
    train(tmp_path / "parts", 6, save_every=6, accumulate=1)
    second = train(tmp_path / "parts", 18, resume=True, save_every=6, accumulate=1, batch_size=2)
    windows = [w for _, batch in reference.batches[6:] for w in batch]
    assert [w for _, batch in second.batches for w in batch] == windows


def test_the_state_is_plain_and_survives_without_a_trainer() -> None:
    data = make_data()
    data.load_state_dict({"next_batch": 10, "global_step": 5, "windows_per_batch": 8})
    assert data.state_dict() == {"next_batch": 10, "global_step": 5, "windows_per_batch": 8}
    inputs, _ = next(iter(data.train_dataloader()))
    expected = next(itertools.islice(make_data().train_dataloader(), 20, None))[0]
    assert torch.equal(inputs, expected)


# --- Splits --------------------------------------------------------------------------------------


def test_every_loader_reads_its_own_split_and_the_vocabulary_is_that_of_training_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.txt").write_text("ab" * 20)
    (tmp_path / "valid.txt").write_text("cd" * 20)
    words = ["data=text_file", f"data.path={tmp_path}", "data.seq_len=8"]
    data = build_data(load_config(words))
    assert data.vocabulary.symbols[1:] == ("a", "b")
    assert next(iter(data.train_dataloader()))[0].unique().tolist() == [1, 2]
    assert next(iter(data.val_dataloader()))[0].unique().tolist() == [0]


def test_the_probe_is_the_beginning_of_a_split_and_the_first_batch_what_training_sees() -> None:
    data = make_data()
    probe = data.probe("val", 3)
    assert probe.dtype == torch.int64
    assert data.vocabulary.decode(probe.flatten()) == CORPUS.split("val")[: 3 * SEQ_LEN]
    assert data.probe("val", 10**6).shape == (len(CORPUS.split("val")) // SEQ_LEN, SEQ_LEN)
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


def test_unknown_characters_are_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = make_data(make_corpus("abcd" * 5, "abcdéabcdèabcd?abcd?"))
    assert data.tokens("val").tolist() == [1, 2, 3, 4, 0] * 4
    assert [r.getMessage() for r in caplog.records] == [
        "made_up: 20 % of the validation text is not in the vocabulary and counts as the unknown "
        "symbol"
    ]


def test_a_batch_that_the_processes_cannot_share_is_refused_in_one_line() -> None:
    data = make_data(batch_size=4)
    data.trainer = Mock(world_size=3, global_step=0, accumulate_grad_batches=1)
    with pytest.raises(ConfigurationError, match=r"4 windows cannot be shared by 3 processes"):
        data.train_dataloader()
