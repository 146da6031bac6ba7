"""Files of a run folder: written whole or not at all, and never through a link.

A run folder may come from somebody else. The folder itself and its ``checkpoints`` may be links of
the user's; nothing else in it is followed, and only regular files are opened.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from invformer.errors import StorageError

PARTIAL = ".partial-"  # begins the name of what is being written or deleted
LINK = "a link, which is not followed"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file under another name, wait until it is on the disk, and give it its name.

    Raises:
        StorageError: the folder cannot be written; what was there is unchanged.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}-{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)
        write_new(partial, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def write_new(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet and wait until it is on the disk."""
    with path.open("xb") as file:  # which follows no link
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_kept(path: Path) -> BinaryIO:
    """Open a file that the run appends to or locks, and make it if there is none."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, "a+b")


def read_regular(path: Path) -> bytes:
    """The content of a file."""
    with _open(path, os.O_RDONLY, "rb") as file:
        return file.read()


def _open(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open a regular file.

    Raises:
        OSError: the path is a link, a pipe, a device or a folder, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a pipe blocks
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, mode)  # type: ignore[return-value]


def refuse_link(folder: Path) -> None:
    """Raise StorageError if a folder that a library writes to is a link."""
    if folder.is_symlink():
        raise StorageError(f"{folder}: {LINK}")


def make_folder(folder: Path) -> None:
    """Make a folder if there is none, and wait until its name is on the disk."""
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)  # another process may make it now
            sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made ({error.strerror})") from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
