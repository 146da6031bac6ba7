"""Language models of the studies: the text they read, how they are trained, and their score."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from invformer.assemble.model import build_model
from invformer.config.schema import MANY, CorpusName, DataConfig, ModelConfig
from invformer.config.section import Section, option
from invformer.data.corpora import read_corpus
from invformer.data.corpus import SPLITS
from invformer.data.vocabulary import Vocabulary
from invformer.data.windows import Batch, TrainingWindows, Windows
from invformer.errors import DataError
from invformer.nn.transformer import CharTransformer
from invformer.weights.spectral import refresh_normalisers, set_manual_refresh
from studies.layer_bounds import Layer
from studies.study import StudyOptions, progress

GRAD_CLIP = 1.0  # as train.py has it
Penalty = Callable[[Layer, Tensor], Tensor]  # of an attention layer and its input


@dataclass(kw_only=True)
class TextConfig(Section, key="data"):
    """The text, and how much of its validation split is scored."""

    name: CorpusName = option("python_docs", "corpus; the first three need no network")
    path: str | None = option(None, "file or folder with the corpus; needed by text_file")
    max_characters: int | None = option(200_000, "that are read; null reads all", "[1000, 1e12]")
    val_characters: int | None = option(8192, "that are scored; null scores all", "[2, 1e9]")
    val_fraction: float = option(0.05, "for validation, of a text without splits", "(0, 1)")
    test_fraction: float = option(0.05, "left out, of a text without splits", "[0, 1)")

    def case_fields(self, seq_len: int, num_windows: int = 1) -> dict[str, Any]:
        """The fields by which a case names this text.

        Raises:
            DataError: the text is shorter than a window, or its validation part than all of them.
        """
        named = {**vars(self), "corpus": self.name, "sha256": ""}
        del named["name"]
        text = TextCase(seed=0, **named).text
        if len(text.train) <= seq_len:
            raise DataError(
                f"seq_len={seq_len}: the training text has {len(text.train)} characters"
            )
        found = (len(text.val) - 1) // seq_len
        if found < num_windows:
            raise DataError(
                f"the {len(text.val)} characters of the validation text make {found} windows of "
                f"{seq_len}, {num_windows} are asked for; raise data.val_characters or ask for "
                "fewer"
            )
        return named | {"sha256": text.sha256}


@dataclass(frozen=True, kw_only=True)
class TextCase:
    """What every case on a text has: the text, by name and content, and a seed."""

    corpus: CorpusName
    path: str | None
    max_characters: int | None
    val_characters: int | None  # None is the whole validation split
    val_fraction: float
    test_fraction: float
    sha256: str
    seed: int

    @property
    def text(self) -> "Text":
        """The text itself."""
        return read_text(
            self.val_characters, name=self.corpus, path=self.path, val_fraction=self.val_fraction,
            test_fraction=self.test_fraction, max_characters=self.max_characters,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus as tokens."""

    train: Integer[Tensor, " train_characters"]
    val: Integer[Tensor, " val_characters"]
    test: Integer[Tensor, " test_characters"]
    vocab_size: int
    sha256: str

    def windows(self, seq_len: int, device: torch.device) -> Batch:
        """Consecutive full windows of the validation text, and the characters that follow each."""
        count = (len(self.val) - 1) // seq_len
        tokens = self.val[: count * seq_len + 1].long().to(device)
        return tokens[:-1].view(count, seq_len), tokens[1:].view(count, seq_len)


@lru_cache(maxsize=2)
def read_text(val_characters: int | None, **config: Any) -> Text:
    """A corpus by fields of ``DataConfig``; for validation its first ``val_characters``, or all."""
    return encoded(DataConfig(**config), val_characters)


def encoded(config: DataConfig, val_characters: int | None = None) -> Text:
    """The corpus of a configuration in the vocabulary of its training split."""
    corpus = read_corpus(config)
    vocabulary = Vocabulary.from_text(corpus.split("train"))
    train, val, test = (vocabulary.encode(corpus.split(split)) for split in SPLITS)
    return Text(train, val[:val_characters], test, vocabulary.size, corpus.sha256[:16])


@dataclass(kw_only=True)
class ModelOptions(StudyOptions):
    """What can be set where models are trained."""

    d_model: int = option(48, "width of the models, channels", "[1, 1e5]")
    num_heads: int = option(4, "attention heads, a divisor of the width", "[1, 1e4]")
    seq_len: int = option(32, "context of the models, characters", "[2, 1e5]")
    batch_size: int = option(12, "windows per batch", "[1, 1e6]")
    num_steps: int = option(300, "optimiser steps", MANY)

    def check(self) -> None:
        """Heads divide the width."""
        if self.d_model % self.num_heads:
            self.refuse("num_heads", f"{self.num_heads} heads do not divide d_model={self.d_model}")


@dataclass(kw_only=True)
class AdamOptions(ModelOptions):
    """The same for small models and Adam at a constant learning rate."""

    d_model: int = option(32, "width of the models, channels", "[1, 1e5]")
    batch_size: int = option(16, "windows per batch", "[1, 1e6]")
    num_steps: int = option(100, "optimiser steps", MANY)
    lr: float = option(5e-3, "learning rate of Adam, constant", "(0, 10]")
    data: TextConfig = field(default_factory=TextConfig)


@dataclass(frozen=True, kw_only=True)
class ModelCase(TextCase):
    """The size and the training of a language model."""

    d_model: int
    num_heads: int
    num_layers: int
    seq_len: int
    batch_size: int
    num_steps: int
    lr: float

    @property
    def batches(self) -> TrainingWindows:
        """What it is trained on."""
        return TrainingWindows(self.text.train, self.seq_len, self.batch_size, self.seed)


def new_model(case: ModelCase, **options: Any) -> CharTransformer:
    """A fresh model of a case's size for its text, in float32; ``options`` of ``ModelConfig``."""
    torch.manual_seed(case.seed)
    config = ModelConfig(
        d_model=case.d_model, num_heads=case.num_heads, num_layers=case.num_layers, **options
    )
    return build_model(config, case.text.vocab_size, case.seq_len).float()


def train(
    model: CharTransformer,
    batches: TrainingWindows,
    optimiser: Optimizer,
    num_steps: int,
    *,
    schedule: LRScheduler | None = None,
    grad_clip: float | None = GRAD_CLIP,
    penalty: Penalty | None = None,
    is_fresh: bool = True,
) -> list[float]:
    """Minimise mean nats per character on batches of a text; stop at a loss that is not finite.

    The first batch initialises a fresh model. ``schedule`` is moved once
    per step; ``penalty`` is added for every attention layer.

    Returns:
        The losses of all steps.
    """
    set_manual_refresh(model)
    device = model.head.weight.device
    losses: list[float] = []
    model.train()
    for step in progress(range(num_steps), "training"):
        inputs, targets = (part.to(device) for part in batches.batch(step))
        if is_fresh and step == 0:
            model.initialise(inputs)
        with layer_inputs(model) if penalty else nullcontext([]) as layers:
            logits = model(inputs, folded=True)
        loss = mean_nats(logits, targets)
        if penalty:
            loss = loss + sum(penalty(layer, z) for layer, z in layers)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimiser.zero_grad()
        loss.backward()
        if grad_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimiser.step()
        if schedule is not None:
            schedule.step()
        refresh_normalisers(model)
    set_manual_refresh(model, False)
    return losses


def train_by_adam(
    model: CharTransformer, case: ModelCase, penalty: Penalty | None = None
) -> list[float]:
    """Adam at the constant learning rate ``case.lr``, without clipping, on the text of the case."""
    optimiser = torch.optim.Adam(model.parameters(), lr=case.lr)
    return train(model, case.batches, optimiser, case.num_steps, grad_clip=None, penalty=penalty)


@contextmanager
def layer_inputs(model: nn.Module, kind: Any = Layer) -> Iterator[list[tuple[Any, Tensor]]]:
    """Every attention layer with its input, in the order of the forward passes inside the block."""
    found: list[tuple[Any, Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, kind)]
    handles = [m.register_forward_pre_hook(lambda m, x: found.append((m, x[0]))) for m in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def mean_nats(logits: Float[Tensor, "batch tokens symbols"], targets: Windows) -> Tensor:
    """Mean cross-entropy, nats per character."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def scores(model: CharTransformer, windows: Windows, targets: Windows) -> tuple[float, float]:
    """Nats per character, and the share of characters that were the likeliest."""
    nats = correct = 0.0
    for tokens, following in zip(windows.split(64), targets.split(64), strict=True):
        logits, true = model(tokens).flatten(0, 1), following.flatten()
        nats += nn.functional.cross_entropy(logits, true, reduction="sum").item()
        correct += (logits.argmax(-1) == true).sum().item()
    return nats / targets.numel(), correct / targets.numel()
