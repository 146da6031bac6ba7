"""A program of two ranks without any training: ``python -m ... BEHAVIOUR TIMEOUT FOLDER``."""

import os
import signal
import sys
import time
from pathlib import Path

from invformer.errors import DataError, Interrupted
from invformer.runs.exit import guarded, stop_on_signals
from invformer.runs.ranks import Supervisor, end_with_supervisor, hear_to_stop, is_rank, tell


def rank(behaviour: str, folder: Path) -> None:
    """What one of them does; the second misbehaves, the first waits for it."""
    end_with_supervisor()
    number = os.environ["LOCAL_RANK"]
    (folder / number).write_text(str(os.getpid()))
    if number == "0":
        tell(directory=str(folder))
    tell(beat=True)
    if number == "1" or behaviour == "finish":
        match behaviour:
            case "finish":
                tell(beat=False)
                return
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise KeyError("what nobody expected")
            case "explain":
                raise DataError("text.txt: cannot be read")
            case "leave":
                os._exit(17)
    if behaviour == "be told":
        told: list[int] = []
        hear_to_stop(lambda number, frame: told.append(number))
        while not told:
            time.sleep(0.01)
        time.sleep(0.3 * int(number))  # one is slower to save than the other
        raise Interrupted(told[0])
    while True:
        time.sleep(0.05)
        if behaviour != "hang":
            tell(beat=True)


def main() -> int:
    """Supervise, or be supervised."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop_on_signals()
    _, behaviour, timeout, folder = sys.argv
    if is_rank():
        return guarded(lambda: rank(behaviour, Path(folder)), debug=False)
    return guarded(lambda: Supervisor(2, float(timeout)).run(), debug=False)


if __name__ == "__main__":
    raise SystemExit(main())
