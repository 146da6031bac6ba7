"""Files of text, and the corpora that they are."""

from pathlib import Path
from typing import Any

from invformer.config.schema import CorpusName, DataConfig
from invformer.data.corpora import read_corpus
from invformer.data.corpus import SPLITS, Corpus


def write(path: Path, text: str | bytes = "some text ") -> Path:
    """A file, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def corpus_at(path: Path | str, name: CorpusName = "text_file", **options: Any) -> Corpus:
    """The corpus of a path, as typed or as a checkpoint names it."""
    path = str(path) if isinstance(path, Path) else path
    return read_corpus(DataConfig(name=name, path=path, **options))


def whole(corpus: Corpus) -> str:
    """All of its text."""
    return "".join(corpus.read(*SPLITS))
