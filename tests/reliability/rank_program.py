"""A program of two ranks without any training: ``python -m ... BEHAVIOUR FOLDER``.

Ranks import PyTorch only if they need it; it would take longer than all else.
"""

import os
import signal
import sys
import time
from pathlib import Path

from invformer.errors import DataError, Interrupted
from invformer.processes.exit import guarded, stop_on_signals
from invformer.processes.ranks import end_with_launcher, hear_to_stop, is_rank


def rank(behaviour: str, folder: Path) -> None:
    """One of them; the second misbehaves, the first waits for it."""
    end_with_launcher()
    number = os.environ["RANK"]
    told: list[int] = []
    if behaviour == "be told":
        hear_to_stop(lambda number, frame: told.append(number))
    (folder / number).write_text(str(os.getpid()))
    while not all((folder / other).exists() for other in "01"):
        time.sleep(0.02)
    match behaviour if number == "1" or behaviour == "finish" else "wait":
        case "finish":
            from invformer.processes.launcher import from_first_rank

            assert from_first_rank("shared" if number == "0" else None) == "shared"
            return
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("what nobody expected")
        case "explain":
            raise DataError("text.txt: cannot be read")
        case "leave":
            os._exit(17)
    while not told:
        time.sleep(0.01)
    time.sleep(0.3 * int(number))  # one is slower to save than the other
    raise Interrupted(told[0], 7, "the same command")


def main() -> int:
    """Launch, or be launched."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop_on_signals()
    _, behaviour, folder = sys.argv

    def work() -> None:
        if is_rank():
            return rank(behaviour, Path(folder))
        from invformer.processes.launcher import launch

        return launch(2)

    return guarded(work, debug=False)


if __name__ == "__main__":
    raise SystemExit(main())
