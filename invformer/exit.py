"""How a program ends: 0, or one line on standard error and the exit code that belongs to it."""

import sys
import traceback
from collections.abc import Callable

from invformer.errors import InvformerError


def guarded(work: Callable[[], None], debug: bool) -> int:
    """Run the program's work and turn whatever ends it into an exit code.

    Args:
        work: what the program does.
        debug: show the traceback instead of hiding it behind one line.

    Returns:
        0 when done; the error's own code; 130 and 143 after SIGINT and SIGTERM; 8 without memory;
        1 for a bug, with its traceback.
    """
    try:
        work()
    except InvformerError as error:
        if debug:
            traceback.print_exc()
        return report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return report("interrupted", 130)
    except MemoryError:
        return report("out of memory: lower data.batch_size or data.seq_len", 8)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            return report("out of device memory: lower data.batch_size or data.seq_len", 8)
        traceback.print_exc()
        return report("this is a bug in invformer; please report it with the traceback above", 1)
    return 0


def report(message: str, exit_code: int) -> int:
    """Print the one line and hand back the code."""
    print(f"error: {message}", file=sys.stderr)
    return exit_code
