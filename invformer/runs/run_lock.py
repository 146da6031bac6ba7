"""One process at a time writes to a run's folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invformer.errors import CheckpointError, StorageError
from invformer.runs.files import open_kept

LOCK = ".lock"
_held: dict[Path, int] = {}  # descriptors


def lock_run(path: Path) -> None:
    """Keep other processes out of a run's folder until this one ends.

    The operating system releases the lock, even after kill -9; the file stays. A file system
    without locks keeps nobody out.

    Raises:
        CheckpointError: another process has it.
        StorageError: the folder takes no file.
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
    """Raise CheckpointError if the lock that this process took was deleted or replaced."""
    held = _held.get(path.resolve())
    if held is None:
        return
    try:
        found = os.lstat(path / LOCK)
    except OSError:
        found = None
    if found is None or not os.path.samestat(found, os.fstat(held)):
        raise CheckpointError(
            f"{path / LOCK} was deleted or replaced while this run was on, so another process may "
            "use its folder; nothing more is written, the same command continues"
        )


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, which is made if there is none, and hold it."""
    with path.open("wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
