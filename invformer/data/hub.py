"""Corpora on the Hugging Face Hub, by ``datasets``, which keeps them for the next time."""

from collections.abc import Iterable
from typing import Any

from invformer.data.corpus import as_bytes
from invformer.errors import DataError, one_line

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
    return texts, source


def reach(repository: str) -> None:
    """Fail at once where ``datasets`` would retry for half a minute; offline by choice is fine."""
    from huggingface_hub import HfApi, constants  # by name: an attribute of the package is lazy

    if not constants.HF_HUB_OFFLINE:
        HfApi().dataset_info(repository, timeout=TIMEOUT)


def rows_to_text(name: str, rows: Iterable[Any]) -> str:
    """The text that a table's rows were made from."""
    if name == "ptb":
        return "".join(f"{row['sentence']}\n" for row in rows)
    if name == "wikitext2":  # its blank lines, " \n" in the original, became empty rows
        return "".join(row["text"] or " \n" for row in rows)
    text = "".join(row["text"] for row in rows)
    return as_bytes(text) if name == "enwik8" else text
