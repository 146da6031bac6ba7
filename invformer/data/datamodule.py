"""A corpus for Lightning: windows of tokens for each split, and where training continues."""

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

import lightning as L
from jaxtyping import Integer
from torch import Tensor

from invformer.data.corpus import Corpus, Split
from invformer.data.tokens import Tokens, tokens_of, unknown_rate
from invformer.data.vocabulary import Vocabulary
from invformer.data.windows import Batch, EvaluationWindows, TrainingWindows, first_sequences
from invformer.errors import DataError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TextDataModule(L.LightningDataModule):
    """The splits of a corpus as batches of windows.

    The training loader never ends: a run is as long as ``max_steps``, and an epoch that a trainer
    limits goes on where the one before ended. Each process gets its share of every batch and of the
    evaluation windows; a run may continue with another number of them.

    A checkpoint carries the number of the next training batch, derived from completed optimiser
    steps: Lightning draws one batch ahead, and batches of a step that was interrupted halfway have
    to come again.

    A training or validation split below ``seq_len + 1`` characters is a DataError. The share of the
    validation split that is not in the vocabulary is logged unless it is zero.
    """

    corpus: Corpus
    vocabulary: Vocabulary
    _: KW_ONLY
    seq_len: int  # N, characters that a window reads
    batch_size: int  # windows per batch, all processes together; a multiple of their number
    eval_batch_size: int = 64  # windows per batch and process in an evaluation
    seed: int = 0  # of the order
    max_val_characters: int | None = None  # of the validation split, its beginning

    def __post_init__(self) -> None:
        super().__init__()
        self._tokens = tokens_of(self.corpus, self.vocabulary, self.max_val_characters)
        self._saved = {"next_batch": 0, "global_step": 0, "windows_per_batch": 0}
        for split in ("train", "val"):
            self.tokens(split)
        if rate := unknown_rate(self.tokens("val")):
            log.warning(
                f"{self.corpus.name}: {100 * rate:.3g} % of the validation text is not in the "
                "vocabulary and counts as the unknown symbol"
            )

    def tokens(self, split: Split) -> Tokens:
        """All tokens of a split; a DataError if they are fewer than a window and its successor."""
        if not self.corpus.is_cut:
            self.corpus.size(split)  # raises if there is none
        tokens, needed = self._tokens[split], self.seq_len + 1
        if len(tokens) < needed:
            advice = self.corpus.fitting(self.seq_len)
            if self.corpus.sizes[split] >= needed:
                advice = f"set data.max_val_characters={needed} or more"
            raise DataError(
                f"{self.corpus.name} ({self.corpus.source}): the {split} split has {len(tokens)} "
                f"{self.corpus.unit}, fewer than data.seq_len + 1 = {needed} (all: "
                f"{self.corpus.lengths()}); {advice}"
            )
        return tokens

    def first_windows(self, split: Split, count: int) -> Integer[Tensor, "windows seq_len"]:
        """At most so many first windows of a split, one after the other: input for measurements."""
        return first_sequences(self.tokens(split), self.seq_len, count)

    def first_batch(self, num_batches: int = 1) -> Batch:
        """The first training batches in one, for initialisation."""
        batch_size = num_batches * self.batch_size
        return TrainingWindows(self.tokens("train"), self.seq_len, batch_size, self.seed).batch(0)

    def windows_of(self, step: int) -> str:
        """Numbers of the windows that an optimiser step reads, in the endless training order."""
        first, after = (self._batch_at(s) * self.batch_size for s in (step, step + 1))
        return f"{first}–{after - 1}"

    def train_dataloader(self) -> TrainingWindows:
        """Training batches from where the checkpoint stopped, without end."""
        if self.trainer is not None:
            count_whole_steps(self.trainer)
        rank, num_processes = self._process
        if self.batch_size % num_processes:
            raise ValueError(f"{num_processes} processes cannot share {self.batch_size} windows")
        order = self.seq_len, self.batch_size // num_processes, self.seed, self._next_batch
        return TrainingWindows(self.tokens("train"), *order, rank, num_processes)

    def val_dataloader(self) -> EvaluationWindows:
        """The validation split, every character once."""
        return EvaluationWindows(
            self.tokens("val"), self.seq_len, self.seq_len, self.eval_batch_size, *self._process
        )

    def on_before_batch_transfer(self, batch: tuple[Tensor, ...], dataloader_idx: int) -> Any:
        """Batches in page-locked memory, from which a CUDA device copies without waiting."""
        assert self.trainer is not None
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        return tuple(part.pin_memory() for part in batch) if on_cuda else batch

    def state_dict(self) -> dict[str, Any]:
        """Where training continues: the batch after the last completed optimiser step."""
        if self.trainer is None:
            return dict(self._saved)
        step, count = self.trainer.global_step, self.batch_size
        return {"next_batch": self._batch_at(step), "global_step": step, "windows_per_batch": count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint stopped, with another batch size at the same window."""
        self._saved = {key: int(state_dict[key]) for key in self._saved}

    @property
    def _process(self) -> tuple[int, int]:
        """Rank, and number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _next_batch(self) -> int:
        """Number of the first batch of the next optimiser step."""
        done = self.trainer.global_step if self.trainer else 0
        return self._batch_at(max(done, self._saved["global_step"]))

    def _batch_at(self, step: int) -> int:
        """Number of the first batch that an optimiser step reads."""
        saved, accumulate = self._saved, self.trainer.accumulate_grad_batches if self.trainer else 1
        first = saved["next_batch"] * saved["windows_per_batch"] // self.batch_size
        return first + (step - saved["global_step"]) * accumulate


def count_whole_steps(trainer: L.Trainer) -> None:
    """Let Lightning count the batches of completed optimiser steps only.

    A checkpoint that was written within a step counts batches whose gradient is lost. Left alone,
    the first step after resuming would accumulate too few, and validation would be early.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    lost = progress.total.ready - trainer.global_step * trainer.accumulate_grad_batches
    for counter in (progress.total, progress.current):
        counter.load_state_dict(dict.fromkeys(vars(counter), counter.ready - lost))
