"""Files of text, read within limits. Every refusal is a DataError of one line.

A path that the user typed may name files of any size, or a pipe. A path that stood in a checkpoint
may name regular files only, with a limit on their size: it may come from anywhere, and reading a
pipe may never begin. Devices are refused, because reading one may never end.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from invformer.config.schema import SavedPath
from invformer.errors import DataError

MOST_BYTES = 64 << 30  # of all that a checkpoint names
CHUNK = 1 << 20


def files_below(folder: Path, suffix: str, foreign: re.Pattern[str] | None = None) -> list[Path]:
    """The files with a suffix, in any case, of a folder and its folders, sorted by their paths.

    What is hidden is left out, as shells do: ``.git``, and the ``._x.txt`` of macOS. So are files
    and folders whose whole names match ``foreign``.
    """

    def is_wanted(name: str) -> bool:
        return not (name.startswith(".") or (foreign and foreign.fullmatch(name)))

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse_unreadable):
        folders[:] = filter(is_wanted, folders)
        wanted = (name for name in filter(is_wanted, names) if name.lower().endswith(suffix))
        found += (Path(parent, name) for name in wanted)
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def require_texts(files: Iterable[Path], path: str) -> None:
    """Refuse, without opening them, files that are missing or that ``path`` may not name."""
    is_typed, size = not isinstance(path, SavedPath), 0
    for file in files:
        try:
            status = file.stat()
        except FileNotFoundError:
            refuse(file, "no such file or folder", path, "check data.path")
        except OSError as error:
            refuse_unreadable(error)
        is_pipe = is_typed and stat.S_ISFIFO(status.st_mode) and file == Path(path)
        if not (stat.S_ISREG(status.st_mode) or is_pipe):
            refuse(file, "not a regular file", path)
        if file.suffix in (".zip", ".parquet"):
            refuse(file, "an archive or a table", path, "make it a text file")
        if is_typed:
            continue
        size += status.st_size
        if size > MOST_BYTES:
            refuse(file, f"more than {MOST_BYTES:,} bytes of text", path)


def chunks(file: Path, path: str) -> Iterator[bytes]:
    """The content of a file or pipe, refused if it has a megabyte of zeros (holes)."""
    try:
        if isinstance(path, SavedPath) and not file.stat().st_size:
            return  # empty, or of the kernel, whose files may never end
        with open(file, "rb") as content:
            while chunk := content.read(CHUNK):
                if len(chunk) == CHUNK and not chunk.strip(b"\0"):
                    refuse(file, "a megabyte of zero bytes is no text", path)
                yield chunk
    except OSError as error:
        refuse_unreadable(error, file)


def refuse_unreadable(error: OSError, file: Path | None = None) -> NoReturn:
    """Raise the error for what the system does not let us read; a failed read names no file."""
    raise DataError(f"{file or error.filename}: cannot be read ({error.strerror})") from None


def refuse(
    file: Path, why: str, path: str, advice: str = "give data.path a plain file, a folder or a pipe"
) -> NoReturn:
    """Raise the error for one file: what is wrong, and what to do if it was typed."""
    if isinstance(path, SavedPath):
        why += ", and it was the checkpoint that named it"
        advice = "name the text yourself with data.path=PATH"
    raise DataError(f"{file}: {why}; {advice}")
