"""How a program ends: 0, or one line on standard error and the exit code that belongs to it."""

import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from invformer.errors import InvformerError, RankLost, Stopped
from invformer.processes.console import printable
from invformer.processes.ranks import (
    REPORTS,
    handlers_restored,
    hear_to_stop,
    is_rank,
    launcher_value,
)

# In the RuntimeErrors of allocators: PyTorch's, the C++ library's, and CUDA's libraries.
OUT_OF_MEMORY = (
    "OutOfMemoryError", "DefaultCPUAllocator", "not enough memory", "can't allocate memory",
    "out of memory", "bad_alloc", "ALLOC_FAILED", "Storage size calculation overflowed",
)  # fmt: skip
STORAGE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM,
    errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
# In the errors of a process that waits for one that is gone.
LOST = (
    "DistBackendError", "DistNetworkError", "DistStoreError", "Connection closed by peer",
    "Connection reset by peer", "Broken pipe", "Timed out waiting", "/gloo/", "Socket Timeout",
)  # fmt: skip

stopping = threading.Lock()  # held from the first signal to stop on
saved = ""  # what ends the line then, once a run has saved something


def guarded(work: Callable[[], None], debug: bool) -> int:
    """Do the work and return 0, or print an error in one line and return its exit code."""
    try:
        work()
    except KeyboardInterrupt:
        return report("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        # Python wraps whatever ends the making of a class, and an import may be making one.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return report("interrupted", 128 + signal.SIGINT)
        return report(*explained(error))
    return 0


def explained(error: Exception) -> tuple[str, int]:
    """The line for an exception, and its exit code."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, InvformerError):
        return str(error), error.exit_code
    of_torch = text if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or any(words in of_torch for words in OUT_OF_MEMORY):
        return (
            "out of memory: halve data.batch_size and double trainer.accumulate (a run that has "
            "begun takes that with run.change=true), lower trainer.eval_batch_size, set "
            "trainer.checkpoint_activations=true, or in a new run lower data.seq_len or "
            "model.d_model; in an evaluation lower evaluate.batch_size, "
            f"evaluate.lipschitz_sequences or evaluate.inversion_sequences ({text:.160})",
            8,
        )
    if is_rank() and any(words in of_torch for words in LOST):
        return f"another process of the run is gone ({text:.160})", RankLost.exit_code
    if isinstance(error, OSError) and error.errno in STORAGE:
        return f"{error.filename or 'the run folder'}: {error.strerror}", 7
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"a bug in invformer: {text:.300} ({where}); repeat with --debug and report it", 1


def report(message: str, exit_code: int) -> int:
    """Print the line and return the code. A rank hands it to our launcher if there is one.

    Under torchrun, a line that only says that a run was stopped or another rank lost is printed by
    the first rank of a machine.
    """
    line = printable(" ".join(message.split()))
    folder = os.environ.get(REPORTS)
    is_consequence = exit_code > 128 or exit_code == RankLost.exit_code
    if folder is not None and is_rank():
        Path(folder, os.environ["RANK"]).write_text(json.dumps([exit_code, line]))
    elif not is_consequence or launcher_value("LOCAL_RANK", 0) == 0:
        print(f"error: {line}", file=sys.stderr)
    return exit_code


def stop_on_signals() -> None:
    """End at once and with one line on a signal to stop, as long as there is nothing to save.

    The training loop replaces these handlers while it runs (see
    ``interruption``).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        # Not an exception, which whatever is being imported or waited for might swallow.
        if stopping.acquire(blocking=False):
            stopped = Stopped(number)
            report(f"{stopped}{saved}", stopped.exit_code)
            os._exit(stopped.exit_code)

    hear_to_stop(stop)


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within, the first signal to stop raises Stopped; later ones are ignored, also afterwards."""

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.acquire(blocking=False):
            raise Stopped(number)

    with handlers_restored():
        hear_to_stop(stop)
        yield
