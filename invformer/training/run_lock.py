"""One process at a time writes to a run's folder."""

import os
from pathlib import Path
from typing import TextIO

from invformer.errors import CheckpointError

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
    """
    key = os.getpid(), path.resolve()
    if fcntl is None or key in _held:
        return
    file = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise CheckpointError(
            f"{path} is in use by another process{f' ({owner})' if owner else ''}: "
            "wait until it has ended, or choose another run.name"
        ) from None
    except OSError:
        file.close()
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    _held[key] = file
