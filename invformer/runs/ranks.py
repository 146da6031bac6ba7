"""Several processes as one program: started, watched and ended together.

The command that was typed becomes a supervisor. It starts the processes that train (the ranks) with
one pipe to each and one from it, and ends with one line and one exit code for all of them.

* If a rank dies or fails, the supervisor ends the others. The run's exit code is the rank's own if
  the rank could say what went wrong (see ``errors``), and 9 otherwise.
* If a rank hangs, the others soon wait for its gradients. When no batch was begun for ``timeout``
  seconds, the supervisor kills all ranks and ends with code 9.
* Nothing is ever written into the pipe to the ranks. It closes when the supervisor is gone, even
  after kill -9, and then the ranks end too.
"""

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from invformer.errors import InvformerError, RankLost

LINK = "INVFORMER_RANK_LINK"
DIRECTORY = "INVFORMER_RUN_DIRECTORY"
GRACE = 3.0  # seconds in which the others may still say what they know about a failure
GRACE_TO_STOP = 75.0  # likewise after a signal: saving, and W&B's last minute
POLL = 0.1  # seconds between looks at the processes
NOT_EXPLAINED = (1, RankLost.exit_code)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those it may run on, within the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            files = (cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text() for file in files)
        if int(quota) > 0:
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        pass
    return max(1, cores)


class RunEnded(InvformerError):
    """The error of a rank, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def hear_to_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP.

    SIGHUP means that the terminal was closed. It stays ignored where it is, as under ``nohup``.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:
        signal.signal(hang_up, handler)


# --- what a rank does ----------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process was started by a supervisor."""
    return LINK in os.environ


def tell(**news: Any) -> bool:
    """Send the supervisor a line, without waiting; False if there is no supervisor."""
    if not is_rank():
        return False
    _, outgoing = map(int, os.environ[LINK].split(","))
    try:
        os.write(outgoing, json.dumps(news).encode() + b"\n")
    except BlockingIOError:
        pass  # it is busy, and a heartbeat is lost
    except OSError:
        return False
    return True


def end_with_supervisor() -> None:
    """End this process when its supervisor is gone."""
    incoming, _ = map(int, os.environ[LINK].split(","))

    def wait() -> None:
        os.read(incoming, 1)  # returns when the other end closes
        os._exit(RankLost.exit_code)

    threading.Thread(target=wait, name="supervisor-watch", daemon=True).start()


# --- what the supervisor does --------------------------------------------------------------------


@dataclass
class Rank:
    """One process, and what it said.

    Attributes:
        number: its rank.
        process: the process.
        link: where its lines arrive.
        heartbeat: when it last began a batch; None before the first and after the last.
        directory: the run's folder, once the first rank has opened it.
        end: its exit code and message, if it said them.
    """

    number: int
    process: subprocess.Popen
    link: int
    heartbeat: float | None = None
    directory: str | None = None
    end: tuple[int, str] | None = None
    unread: bytes = b""

    def read(self) -> bool:
        """Take in the lines that arrived; False at the end."""
        content = os.read(self.link, 1 << 16)
        *lines, self.unread = (self.unread + content).split(b"\n")
        for line in lines:
            news = json.loads(line)
            if "beat" in news:
                self.heartbeat = time.monotonic() if news["beat"] else None
            self.directory = news.get("directory", self.directory)
            if "end" in news:
                self.end = news["end"], news["message"]
        return bool(content)

    @property
    def failed(self) -> bool:
        """Whether it ended with another code than 0."""
        return self.process.poll() not in (None, 0)

    def explanation(self) -> tuple[int, str]:
        """Exit code and message: what the rank said, or what the system says about it."""
        code = self.process.returncode
        if self.end is not None and self.end[0] == code:
            return self.end
        if code < 0:
            return RankLost.exit_code, f"was ended by {signal.Signals(-code).name}"
        return RankLost.exit_code, f"ended with exit code {code}"


class Supervisor:
    """Starts ranks and watches over them.

    Args:
        count: how many.
        timeout: seconds in which every rank has to begin a batch.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self.count = count
        self.timeout = timeout
        self.ranks: list[Rank] = []
        self.signal: int | None = None
        self._port = free_port()
        self._lifeline = os.pipe()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Wait until all are done.

        Raises:
            RunEnded: a rank failed and said why, or a signal arrived.
            RankLost: a rank died or hangs.
        """
        hear_to_stop(self._forward)
        try:
            self.start(0, {})
            while any(rank.process.poll() is None for rank in self.ranks):
                self.listen(POLL)
                directory = self.ranks[0].directory
                if directory is not None and self.signal is None and len(self.ranks) < self.count:
                    for number in range(1, self.count):
                        self.start(number, {DIRECTORY: directory})
                if any(rank.failed for rank in self.ranks):
                    break
                self.refuse_standstill()
            deadline = time.monotonic() + (GRACE if self.signal is None else GRACE_TO_STOP)
            while self._selector.get_map() and time.monotonic() < deadline:
                self.listen(POLL)  # another rank may know more about a failure
            self.conclude()
        finally:
            for rank in self.ranks:
                rank.process.kill()  # also one that is stopped; those that ended do not mind
                rank.process.wait()

    def start(self, number: int, more: dict[str, str]) -> None:
        """Start the same command again as a rank."""
        link, outgoing = os.pipe()
        os.set_blocking(outgoing, False)
        incoming = self._lifeline[0]
        threads = max(1, usable_cores() // self.count)
        environment = {
            "OMP_NUM_THREADS": str(threads), **os.environ, **more,
            LINK: f"{incoming},{outgoing}", "LOCAL_RANK": str(number), "NODE_RANK": "0",
            "WORLD_SIZE": str(self.count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            pass_fds=(incoming, outgoing),
            start_new_session=True,  # a Ctrl-C in the terminal reaches it through us alone
        )
        os.close(outgoing)
        rank = Rank(number, process, link)
        self.ranks.append(rank)
        self._selector.register(link, selectors.EVENT_READ, rank)
        if self.signal is not None:  # it arrived a moment ago
            process.send_signal(self.signal)

    def listen(self, seconds: float) -> None:
        """Read the ranks' lines, for a moment."""
        if not self._selector.get_map():
            time.sleep(seconds)
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._selector.unregister(key.fileobj)

    def refuse_standstill(self) -> None:
        """Raise RankLost if a rank has begun no batch for too long."""
        beats = [(rank.heartbeat, rank.number) for rank in self.ranks if rank.heartbeat is not None]
        if beats and time.monotonic() - min(beats)[0] > self.timeout:
            raise RankLost(
                f"rank {min(beats)[1]} has begun no batch for {self.timeout:g} s "
                "(trainer.rank_timeout), all were stopped; the same command continues"
            )

    def conclude(self) -> None:
        """Raise the error that ended the run, in one line for all, if there was one.

        A rank's own error comes before errors that only say that another process is gone.
        """
        failed = [rank for rank in self.ranks if rank.failed]
        if not failed:
            return
        failed.sort(key=lambda rank: rank.end is not None and rank.end[0] == RankLost.exit_code)
        ends = [(rank.number, *rank.explanation()) for rank in failed]
        explained = [end for end in ends if end[1] not in NOT_EXPLAINED]
        number, code, message = (explained or ends)[0]
        if explained:
            raise RunEnded(message, code)
        if self.signal is not None:
            name = signal.Signals(self.signal).name
            raise RunEnded(f"stopped by {name} before anything was saved", 128 + self.signal)
        raise RankLost(
            f"rank {number}: {message}; all were stopped, the same command continues from the last "
            "checkpoint"
        )

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for rank in self.ranks:
            rank.process.send_signal(number)


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
