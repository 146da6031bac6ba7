"""Results on disk: a CSV of one row per case."""

import csv
import io
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_origin

from invformer.errors import StorageError
from invformer.processes import exit as ending
from invformer.training.fit import SAVED

LARGEST_CELL = 2**31 - 1  # characters; a reader's own limit, 131,072, is less than is written
EVIDENCE = ("seconds", "hardware", "commit")  # columns of every row beside its case and result

AnyCase = TypeVar("AnyCase")
AnyResult = TypeVar("AnyResult")


@dataclass(frozen=True)
class Measured(Generic[AnyResult]):
    """One row of the file: a result and under what circumstances it was obtained."""

    result: AnyResult
    seconds: float
    hardware: str
    commit: str


class RowFile(Generic[AnyCase, AnyResult]):
    """A CSV of one row per case, appended row by row.

    Columns are the fields of the case, those of the result, and the circumstances. Text stands as
    it is, everything else as JSON, so that numbers come back as they went.
    """

    def __init__(self, path: Path, case: type[AnyCase], result: type[AnyResult]) -> None:
        self.path = path
        self.case = case
        self.result = result
        self.types = {f.name: f.type for part in (case, result) for f in fields(part)}  # pyright: ignore
        self.columns = [*self.types, *EVIDENCE]

    def read(self) -> dict[AnyCase, Measured[AnyResult]]:
        """Every complete row by its case; a last line torn by a crash is cut off the file.

        Raises:
            StorageError: the file cannot be opened, has other columns, or a line that is no row.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_bytes() if self.path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if not whole:
                self.path.write_text(",".join(self.columns) + "\n", encoding="utf-8")
            elif whole != content:
                self.path.write_bytes(whole)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be opened ({error.strerror})") from error
        csv.field_size_limit(LARGEST_CELL)
        try:
            lines = list(csv.reader(io.StringIO(whole.decode("utf-8"), newline="")))
        except (UnicodeDecodeError, csv.Error):
            lines = [["no table"]]
        if lines and lines[0] != self.columns:
            raise StorageError(
                f"{self.path} has other columns than this version writes: choose another out=FOLDER"
            )
        return dict(self._decode(number, cells) for number, cells in enumerate(lines[1:], 2))

    def append(self, case: AnyCase, row: Measured[AnyResult]) -> None:
        """Write one row through to the disk; StorageError if the file cannot be written."""
        values = vars(case) | vars(row.result)
        cells = [v if is_text(self.types[k]) else json.dumps(v) for k, v in values.items()]
        try:
            ending.saved = SAVED
            with self.path.open("a", encoding="utf-8", newline="") as file:
                line = [*cells, str(row.seconds), row.hardware, row.commit]
                csv.writer(file, lineterminator="\n").writerow(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error.strerror})") from error

    def _decode(self, number: int, cells: list[str]) -> tuple[AnyCase, Measured[AnyResult]]:
        """The case and the result in one line's cells."""
        try:
            text = dict(zip(self.columns, cells, strict=True))
            values = {
                name: text[name] if is_text(type_) else json.loads(text[name])
                for name, type_ in self.types.items()
            }
            case, result = (
                part(**{f.name: values[f.name] for f in fields(part)})  # pyright: ignore
                for part in (self.case, self.result)
            )
            row = Measured(result, float(text["seconds"]), text["hardware"], text["commit"])
        except (ValueError, TypeError):
            raise StorageError(
                f"{self.path}, line {number}: not a row of this study; delete the line to measure "
                "its case again"
            ) from None
        return case, row  # pyright: ignore


def is_text(type_: Any) -> bool:
    """Whether a field's values are written as they are."""
    return type_ is str or get_origin(type_) is Literal
