"""The text that the language-model studies read: its options, its tokens, read once."""

# ruff: noqa: RUF009  # option() returns dataclass fields

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from jaxtyping import Integer
from torch import Tensor

from invformer.config.schema import CorpusName
from invformer.config.section import Section, option
from invformer.data.corpora import load_corpus
from invformer.data.vocabulary import Vocabulary


@dataclass(kw_only=True)
class CorpusConfig(Section):
    """The text."""

    key: ClassVar[str] = "data"
    name: CorpusName = option("python_docs", "corpus; the first three need no network")
    path: str | None = option(None, "file or folder with the corpus; needed by text_file")
    max_characters: int | None = option(
        200_000, "read only this many characters; null reads all", within="[1000, 1e12]"
    )

    def check(self) -> None:
        """A local corpus says where it is."""
        if self.name == "text_file" and self.path is None:
            self.refuse("path", "text_file needs one: data.path=FILE or data.path=FOLDER")


@dataclass(kw_only=True)
class TextConfig(CorpusConfig):
    """The text, and how much of its validation split is scored."""

    val_characters: int = option(8192, "characters that are scored", within="[2, 1e9]")


@dataclass(kw_only=True)
class WholeTextConfig(CorpusConfig):
    """The text, whose validation split is scored whole."""

    val_fraction: float = option(
        0.05, "share of the text for validation, where the corpus has no splits", within="(0, 1)"
    )
    test_fraction: float = option(
        0.05, "share of the text that is left out, where the corpus has no splits", within="[0, 1)"
    )

    def check(self) -> None:
        """Something is left to train on."""
        super().check()
        if self.val_fraction + self.test_fraction >= 1:
            total = f"{self.val_fraction} + test_fraction {self.test_fraction}"
            self.refuse("val_fraction", f"{total} leaves no text for training")


@dataclass(frozen=True)
class Text:
    """A corpus as tokens."""

    train: Integer[Tensor, " train_characters"]
    val: Integer[Tensor, " val_characters"]
    vocab_size: int
    sha256: str


@lru_cache(maxsize=2)
def read_text(
    corpus: CorpusName,
    path: str | None,
    max_characters: int | None,
    val_characters: int | None,
    val_fraction: float = 0.05,
    test_fraction: float = 0.05,
) -> Text:
    """The corpus, encoded in the vocabulary of its training split.

    Of the validation split the first ``val_characters``, or all.
    """
    found = load_corpus(corpus, path, val_fraction, test_fraction, max_characters)
    vocabulary = Vocabulary.from_text(found.train)
    val = vocabulary.encode(found.split("val")[:val_characters])
    return Text(vocabulary.encode(found.train), val, vocabulary.size, found.sha256[:16])
