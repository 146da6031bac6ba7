"""One process at a time writes to a run's folder."""

import os
from pathlib import Path
from typing import TextIO

from invformer.errors import CheckpointError, StorageError

try:
    import fcntl
except ImportError:  # not on Windows: there nobody is kept out
    fcntl = None

LOCK = ".lock"
# By process, since a child that was forked has inherited what its parent holds.
_held: dict[tuple[int, Path], TextIO] = {}


def lock_run(path: Path) -> None:
    """Keep other processes out of a run's folder until this one has ended, however it ends.

    The operating system holds the lock, so that none is left behind; the file it is on stays. Where
    a file system knows no locks, nobody is kept out.

    Args:
        path: the folder; it exists.

    Raises:
        CheckpointError: another process has it.
        StorageError: the folder takes no file.
    """
    key = os.getpid(), path.resolve()
    if fcntl is None or key in _held:
        return
    try:
        file = (path / LOCK).open("a+", encoding="utf-8")
        if is_taken(file):
            file.seek(0)
            owner = file.read().strip() or "of unknown number"
            file.close()
            raise CheckpointError(
                f"{path} is in use by another process ({owner}): "
                "wait until it has ended, or choose another run.name"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked ({error.strerror})") from error
    _held[key] = file


def is_taken(file: TextIO) -> bool:
    """Lock a file for this process; whether another one has it."""
    assert fcntl is not None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False
