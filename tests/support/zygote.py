"""Real runs of train.py that cost a fork instead of five seconds of imports.

``python -m tests.support.zygote`` imports everything once. Then, for every line on its standard
input (a JSON object, see :meth:`Zygote.start`), it forks a child that runs the program, and writes
the child's process number; when the child ends, its exit code (negative for a signal).
"""

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it printed."""

    code: int  # negative for a signal
    stdout: str
    stderr: str


class Zygote:
    """The mother of all runs; one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        environment.pop("WANDB_SERVICE", None)  # that of a test in this process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start(
        self,
        arguments: Sequence[str],
        *,
        signals: Sequence[tuple[str, int, int]] = (),  # place, n, number
        environment: dict[str, str | None] | None = None,
        before: str | None = None,
        kill_after: float | None = None,
        program: str | None = None,
    ) -> int:
        """Begin a run; returns its process number.

        It sends itself each of ``signals`` when it calls for the n-th time what a place names, such
        as ``module:Class.method``; calls ``before``, a ``module:function``, first, which may break
        something; and is killed ``kill_after`` so many seconds, if it is not done. A value of
        ``environment`` that is None removes a variable. ``program`` is a module whose ``main`` runs
        as ``python -m`` would run it, in the place of train.py.
        """
        request = {
            "arguments": list(arguments), "signals": list(signals), "folder": str(self.folder),
            "environment": environment or {}, "before": before, "kill_after": kill_after,
            "program": program,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def wait(self) -> Ended:
        """Wait for the end of the run that was started last."""
        code = int(self._answer())
        return Ended(code, *((self.folder / name).read_text() for name in ("stdout", "stderr")))

    def run(self, arguments: Sequence[str], **options: Any) -> Ended:
        """Begin a run and wait for its end."""
        self.start(arguments, **options)
        return self.wait()

    def close(self) -> None:
        """End the zygote itself."""
        self._process.communicate(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died"
        return line


def find(place: str) -> tuple[Any, str]:
    """What holds ``module:Class.method``, and under which name."""
    end = max(place.rfind(":"), place.rfind("."))
    return pkgutil.resolve_name(place[:end]), place[end + 1 :]


def send_at(place: str, count: int, number: int) -> None:
    """Let the ``count``-th call of a function be preceded by a signal to this process."""
    holder, name = find(place)
    original: Callable = getattr(holder, name)
    calls = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(holder, name, wrapped)


def child(request: dict[str, Any]) -> int:
    """The run itself, in a process of its own."""
    from invformer.commands import COMMANDS, run

    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for place, count, number in request["signals"]:
        send_at(place, count, number)
    if request["before"]:
        holder, name = find(request["before"])
        getattr(holder, name)()
    program = request["program"]
    sys.argv = [program or "train.py", *request["arguments"]]
    try:
        if program:
            sys.orig_argv = [sys.executable, "-m", *sys.argv]
            return importlib.import_module(program).main()
        run(*COMMANDS["train"])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    raise AssertionError("train.py ends with SystemExit")


def main() -> None:
    """Import, then fork on demand."""
    import matplotlib.figure  # noqa: F401
    import omegaconf  # noqa: F401
    import torch

    import invformer.training.build
    import invformer.training.fit  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = child(request)
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(end_of(pid, request["kill_after"]), flush=True)
    os._exit(0)  # taking all those modules down takes longer than a run


def end_of(pid: int, kill_after: float | None) -> int:
    """Wait for a child, or kill it; its exit code, negative for a signal."""
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
