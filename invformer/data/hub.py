"""Corpora on the Hugging Face Hub, by ``datasets``, which keeps them for the next time."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from invformer.data.corpus import as_bytes
from invformer.errors import DataError, StorageError
from invformer.processes.contained import one_line
from invformer.runs.files import replace_file

TIMEOUT = 5.0  # seconds to wait for the Hub's first answer
# The repository and configuration of each corpus. Where the main branch is a loading script, which
# ``datasets`` no longer runs: splits and their files on the branch refs/convert/parquet.
REPOSITORIES: dict[str, tuple[str, str | None]] = {
    "tiny_shakespeare": ("karpathy/tiny_shakespeare", None),
    "ptb": ("ptb-text-only/ptb_text_only", None),
    "text8": ("afmck/text8", None),
    "enwik8": ("LTCB/enwik8", None),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
}
PARQUET: dict[str, dict[str, str]] = {
    "ptb": {s: f"penn_treebank/{s}/*.parquet" for s in ("train", "validation", "test")},
    "enwik8": {"train": "enwik8-raw/train/*.parquet"},
}


def read(name: str) -> tuple[dict[str, str], str]:
    """The splits of a corpus as the Hub calls them, and the source in words.

    A DataError within seconds if the Hub does not answer.
    """
    repository, configuration = REPOSITORIES[name]
    source = f"Hugging Face Hub, {repository}"
    try:
        import datasets  # takes a second, and only these corpora need it

        reach(repository)
        if name in PARQUET:
            branch = f"hf://datasets/{repository}@refs%2Fconvert%2Fparquet"
            files = {split: f"{branch}/{path}" for split, path in PARQUET[name].items()}
            tables = datasets.load_dataset("parquet", data_files=files)
        else:
            tables = datasets.load_dataset(repository, configuration)
        texts = {str(split): rows_to_text(name, tables[split]) for split in tables}
    except Exception as error:  # which ones differs between releases of datasets
        raise DataError(
            f"{source}: cannot be loaded ({one_line(error)}); set data.path to a local copy, use "
            "data.name=python_docs, or set HF_HUB_OFFLINE=1 if it was downloaded before (and "
            "delete what was downloaded if it is damaged)"
        ) from None
    refuse_changed_cache(source, tables, texts.values())
    return texts, source


def reach(repository: str) -> None:
    """Fail at once where ``datasets`` would retry for half a minute; offline by choice is fine."""
    from huggingface_hub import HfApi, constants  # by name: an attribute of the package is lazy

    if not constants.HF_HUB_OFFLINE:
        HfApi().dataset_info(repository, timeout=TIMEOUT)


def refuse_changed_cache(source: str, tables: Any, texts: Iterable[str]) -> None:
    """Compare what ``datasets`` has kept with what it was when it was first read.

    The library does not look: a changed byte in its cache is a changed text. The hash lies in the
    folder of the tables, and is deleted with them.
    """
    files = next(iter(tables.values())).cache_files
    if not files:
        return
    folder = Path(files[0]["filename"]).parent
    record = folder / "invformer.sha256"
    found = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    try:
        if not record.exists():
            replace_file(record, found)
        known = record.read_text(encoding="ascii")
    except (OSError, StorageError):  # a cache that belongs to somebody else is not guarded
        return
    if known != found:
        raise DataError(
            f"{source}: the copy in {folder} is not what it was when it was first read (SHA-256 "
            f"{known[:12]}…, now {found[:12]}…); delete that folder to load it anew"
        )


def rows_to_text(name: str, rows: Iterable[Any]) -> str:
    """The text that a table's rows were made from."""
    if name == "ptb":
        return "".join(f"{row['sentence']}\n" for row in rows)
    if name == "wikitext2":  # its blank lines, " \n" in the original, became empty rows
        return "".join(row["text"] or " \n" for row in rows)
    text = "".join(row["text"] for row in rows)
    return as_bytes(text) if name == "enwik8" else text
