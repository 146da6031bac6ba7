"""A corpus as tokens: in memory, or in a file of the cache that all runs and ranks map."""

import hashlib
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.config.schema import ScoredSplit
from invformer.data.corpus import SPLITS, Corpus
from invformer.data.vocabulary import Vocabulary
from invformer.errors import DataError, StorageError
from invformer.kernels.host import cache_folder
from invformer.runs.files import PARTIAL, wait_for_lock

MAPPED_BYTES = 64 << 20  # corpora with more tokens are mapped

Tokens = Integer[Tensor, "characters"]


def tokens_of(
    corpus: Corpus, vocabulary: Vocabulary, max_val_characters: int | None = None
) -> dict[ScoredSplit, Tokens]:
    """The tokens of every split, and of ``all``, one split after the other.

    Those of a long text are written once to ``$XDG_CACHE_HOME/invformer/tokens`` (``~/.cache``).
    All processes share the memory in which the operating system keeps the file. The validation
    split ends after ``max_val_characters``.
    """
    if corpus.total * vocabulary.dtype.itemsize > MAPPED_BYTES:
        tokens = mapped(corpus, vocabulary)
    else:
        tokens = torch.cat([vocabulary.encode(piece) for piece in corpus.read(*SPLITS)])
    splits = dict(zip(SPLITS, tokens.split(list(corpus.sizes.values())), strict=True))
    return {**splits, "val": splits["val"][:max_val_characters], "all": tokens}


def mapped(corpus: Corpus, vocabulary: Vocabulary) -> Tokens:
    """The tokens of a corpus in a file, named by the hash of its text and of its vocabulary."""
    symbols = "".join(vocabulary.symbols).encode("utf-8", "surrogatepass")
    name = hashlib.sha256(corpus.sha256.encode() + symbols).hexdigest()
    num_bytes, folder = corpus.total * vocabulary.dtype.itemsize, None
    try:
        folder = cache_folder() / "tokens"
        file = folder / f"{name}.tokens"
        if not is_whole(file, num_bytes):  # others may only read the cache
            folder.mkdir(parents=True, exist_ok=True)
            with wait_for_lock(file.with_suffix(".lock")):
                if not is_whole(file, num_bytes):
                    write_tokens(file, corpus, vocabulary)
        numbers = np.memmap(file, vocabulary.dtype, "r", shape=corpus.total)
    except OSError as error:
        where = error.filename or folder or "the cache"  # a full disk names no file
        raise StorageError(
            f"{where}: tokens cannot be written ({error.strerror}); free "
            f"{num_bytes:,} bytes, or set XDG_CACHE_HOME to a folder that has them"
        ) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(numbers)


def is_whole(file: Path, num_bytes: int) -> bool:
    """Whether there is a file of this size."""
    return file.exists() and file.stat().st_size == num_bytes


def write_tokens(file: Path, corpus: Corpus, vocabulary: Vocabulary) -> None:
    """Write the tokens piece by piece, and give the file its name when it is complete."""
    partial, sha = file.with_name(PARTIAL + file.name), hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for piece in corpus.hashed(sha):
                out.write(vocabulary.encode(piece).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        if sha.hexdigest() != corpus.sha256:
            raise DataError(f"{corpus.source} changed while it was read; start again")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def unknown_rate(tokens: Integer[Tensor, "..."]) -> float:
    """The share of tokens that are the unknown symbol; 0 of none."""
    unknown = tokens.numel() - int(np.count_nonzero(tokens.cpu().numpy()))  # takes no memory
    return unknown / max(1, tokens.numel())
