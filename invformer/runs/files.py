"""Files of a run folder: written whole or not at all, never through a link, by one process.

A run folder may come from somebody else. The folder itself and its ``checkpoints`` may be links of
the user's; nothing else in it is followed, and only regular files are opened.
"""

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from invformer.errors import CheckpointError, StorageError

PARTIAL = ".partial-"  # begins the name of what is being written or deleted
LINK = "a link, which is not followed"
LOCK = ".lock"
UNFINISHED_EXPORT = f"{PARTIAL}manifest.json"  # in a folder until all other files are written
_held: dict[Path, int] = {}  # by run folder, descriptors that keep its lock


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file under another name, wait until it is on the disk, and give it its name.

    If that fails, what was there is unchanged, and StorageError is raised. A run whose folder was
    renamed writes nothing (:func:`require_lock`).
    """
    require_lock(path.parent)
    partial = path.with_name(f"{PARTIAL}{path.name}-{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)
        write_new(partial, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the report atomically; numbers JSON has no literal for become null."""
    make_folder(path.parent)
    replace_file(path, json.dumps(finite(report), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The tree with None in place of infinities and NaN."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def require_new_folder(folder: Path) -> None:
    """Raise StorageError unless an export may go there: it is new, empty or an unfinished one."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error
    if names and UNFINISHED_EXPORT not in names:
        raise StorageError(f"{folder} is not empty; name a new folder")


def write_new(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet and wait until it is on the disk."""
    with path.open("xb") as file:  # which follows no link
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_kept(path: Path) -> BinaryIO:
    """Open a file that the run appends to or locks, and make it if there is none."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, "a+b")


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The content of a file; an OSError if it has more than so many bytes."""
    with _open(path, os.O_RDONLY, "rb") as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read()


def _open(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open a regular file; raises OSError for a link, a pipe, a device or a folder."""
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
    require_lock(folder)
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


def lock_run(path: Path) -> None:
    """Keep other processes out of a run's folder until this one ends.

    The operating system releases the lock, even after kill -9; the file stays. A file system
    without locks keeps nobody out. Raises CheckpointError if another process has it, and
    StorageError if the folder takes no file.
    """
    if path.resolve() in _held:
        return
    try:
        with open_kept(path / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read(200).decode(errors="replace").strip() or "of unknown number"
                raise CheckpointError(
                    f"{path} is in use by another process ({owner}): "
                    "wait until it has ended, or choose another run.name"
                ) from None
            except OSError:  # a file system without locks
                pass
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
            _held[path.resolve()] = os.dup(file.fileno())  # which keeps the lock
    except OSError as error:
        raise StorageError(f"{path / LOCK}: cannot be locked ({error.strerror})") from error


def require_lock(path: Path) -> None:
    """Raise CheckpointError if a folder that this process locked was renamed, or its lock lost."""
    held = _held.get(path.resolve())
    with suppress(OSError):
        if held is None or os.path.samestat(os.lstat(path / LOCK), os.fstat(held)):
            return
    if not path.exists():
        raise CheckpointError(
            f"{path} was renamed or deleted while this run was on; nothing more is written. To "
            f"continue it where it is now: python train.py config=FOLDER"
        )
    raise CheckpointError(
        f"{path / LOCK} was deleted or replaced while this run was on, so another process may use "
        "its folder; nothing more is written, the same command continues"
    )


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, which is made if there is none, and hold it."""
    with path.open("wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
