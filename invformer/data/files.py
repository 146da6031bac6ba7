"""Files of text: all of what somebody typed, little on a checkpoint's word, nothing without end."""

import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from invformer.errors import DataError
from invformer.runs.checkpoint import MEMORY

# Bytes that are read of what does not say how many it has, or was not typed. A pipe is in memory,
# as bytes, text and tokens at once.
MOST_BYTES = 64 << 30
MOST_OF_A_PIPE = min(4 << 30, MEMORY // 3)
MOST_ENTRIES = 100_000  # files and folders looked at below a folder that was not typed
CHUNK = 1 << 20
ARCHIVE_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, ValueError, EOFError, OSError,
)  # fmt: skip
RESOURCE_FORKS = "__MACOSX/"  # what macOS puts beside the files of an archive


class SavedPath(str):
    """A path that nobody typed: it stood in a checkpoint, which may come from anywhere."""


class Reader:
    """Reads the files of one path: a file, a folder or a pipe; ``~`` is the home folder.

    Whoever types a path means all of a file, or a pipe. A checkpoint may name regular files only,
    of a few gigabytes together: a pipe may never begin, and a folder may be that of the system.
    Devices, which may never end, are nobody's text. Every refusal is a DataError of one line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))
        self.is_typed = not isinstance(path, SavedPath)
        self.most = self.left = MOST_BYTES  # in all, and that may still be read of what is bounded

    def chunks(self, file: Path) -> Iterator[bytes]:
        """The content of the path, or of a file below it; of a ``.zip`` that of the file in it."""
        try:
            status = file.stat()
            self.require_text(file, status)
            if stat.S_ISFIFO(status.st_mode):
                self.most = self.left = MOST_OF_A_PIPE
            # A pipe waits for whoever writes into it; some regular files of the kernel would, too.
            flags = 0 if stat.S_ISFIFO(status.st_mode) else getattr(os, "O_NONBLOCK", 0)
            with open(file, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as stream:
                is_whole = self.is_typed and stat.S_ISREG(status.st_mode)
                if file.suffix == ".zip":
                    yield from self.unzip(stream, file)
                else:
                    yield from self.drain(stream, file, is_bounded=not is_whole)
        except FileNotFoundError:
            raise DataError(f"{file}: no such file or folder; check data.path") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from None

    def require_text(self, file: Path, status: os.stat_result) -> None:
        """Refuse, without opening it, a device or what is too large; if nobody typed the path, also
        a pipe, and what says that it is empty, as files of the kernel do, which are no text."""
        kind = status.st_mode
        may_be_pipe = self.is_typed and file == self.path
        is_file = stat.S_ISREG(kind) or stat.S_ISDIR(kind)  # opening a folder says what it is
        if not is_file and not (may_be_pipe and stat.S_ISFIFO(kind)):
            self.refuse(file, "not a regular file")
        if not self.is_typed and status.st_size > self.left:
            self.refuse_length(file)
        if not self.is_typed and stat.S_ISREG(kind) and status.st_size == 0:
            self.refuse(file, "empty")

    def drain(self, stream: IO[bytes], file: Path, *, is_bounded: bool = True) -> Iterator[bytes]:
        """A stream to its end; refused if it is too long or has a megabyte of zeros (holes)."""
        while chunk := stream.read(CHUNK):
            self.left -= len(chunk)
            if is_bounded and self.left < 0:
                self.refuse_length(file)
            if len(chunk) == CHUNK and not chunk.strip(b"\0"):
                self.refuse(file, "a megabyte of zero bytes is no text")
            yield chunk

    def unzip(self, stream: IO[bytes], file: Path) -> Iterator[bytes]:
        """The one file in an archive."""
        try:
            with zipfile.ZipFile(stream) as archive:
                members = [
                    member for member in archive.infolist()
                    if not (member.is_dir() or member.filename.startswith(RESOURCE_FORKS))
                ]  # fmt: skip
                if len(members) != 1:
                    raise DataError(f"{file}: {len(members)} files in the archive instead of one")
                if members[0].file_size > self.left:
                    self.refuse_length(file)
                with archive.open(members[0]) as inner:
                    yield from self.drain(inner, file)
        except ARCHIVE_ERRORS as error:
            raise DataError(f"{file}: not a readable archive ({error})") from None

    def text_files(self) -> list[Path]:
        """The ``*.txt`` of the folder and its folders, in any case, in the order of their paths.

        What is hidden is left out, as shells do: ``.git``, and the ``._x.txt`` of macOS.
        """
        found: list[Path] = []
        entries = 0
        for parent, folders, names in os.walk(self.path):
            entries += len(folders) + len(names)
            if not self.is_typed and entries > MOST_ENTRIES:
                self.refuse(self.path, f"more than {MOST_ENTRIES:,} files and folders")
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [
                Path(parent, name)
                for name in names
                if name.lower().endswith(".txt") and not name.startswith(".")
            ]
        return sorted(found, key=lambda file: file.relative_to(self.path).parts)

    def refuse_length(self, file: Path) -> NoReturn:
        """Raise the error for a file that is too long."""
        self.refuse(file, f"more than {self.most:,} bytes of text")

    def refuse(self, file: Path, why: str) -> NoReturn:
        """Raise the error for one file: what is wrong, and what to do."""
        if self.is_typed:
            raise DataError(f"{file}: {why}; give data.path a plain file, a folder or a pipe")
        raise DataError(
            f"{file}: {why}, and it was the checkpoint that named it; name the text yourself with "
            "data.path=PATH"
        )
