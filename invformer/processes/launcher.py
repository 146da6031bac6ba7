"""Several processes as one program, started and watched by torch's elastic launcher.

``trainer.devices=2`` makes the typed command a launcher, which starts the same command again as
ranks on this machine. ``torchrun`` starts train.py as ranks of one or several machines.
docs/reliability.md says what happens if a rank or the launcher dies or hangs.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore  # documented, but not in an __all__
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from invformer.errors import InvformerError, RankLost
from invformer.processes.ranks import POLL, REPORTS, signals_to_stop, usable_cores

GRACE_TO_STOP = 75  # seconds for ranks after a signal: saving, and W&B's last minute


def from_first_rank(text: str | None) -> str:
    """The text of the first rank, in every rank; the others pass None."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"invformer/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if text is not None:
        store.set(key, text)
    while not store.check([key]):
        time.sleep(POLL)  # not in the store's own wait, during which signals are not handled
    return store.get(key).decode()


def launch(count: int) -> None:
    """Start the typed command again as ranks on this machine and wait until all are done.

    Raises:
        InvformerError: a rank failed and said why, or a signal arrived.
        RankLost: a rank died, or failed without saying why.
    """
    logging.disable(logging.CRITICAL)  # the launcher has one line to say, and it is ours
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    # Older releases of torch always wait for 30 seconds.
    known = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    grace: dict[str, Any] = {"shutdown_timeout": GRACE_TO_STOP} if known else {}
    with tempfile.TemporaryDirectory(prefix="invformer-ranks-") as folder:
        os.environ[REPORTS] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="invformer",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle=",".join(signals_to_stop()),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **grace,
        )
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise conclusion(Path(folder), codes) from None
        except SignalException as stop:
            raise conclusion(Path(folder), {}, stop.sigval) from None


def conclusion(folder: Path, codes: dict[int, int], stopped: int | None = None) -> InvformerError:
    """The error that ended the run, in one line for all.

    A rank's own error comes first, then a rank that could not say what happened, then those that
    only say that another process is gone or that they were told to stop.

    The folder has the ranks' reports, and the codes are of those that failed by themselves; a
    signal may have stopped all.
    """
    reports = {}
    for file in folder.iterdir():
        with suppress(OSError, ValueError):  # killed while it wrote, or not a report
            reports[int(file.name)] = json.loads(file.read_text())
    ends = []
    for rank, code in (codes or {rank: code for rank, (code, _) in reports.items()}).items():
        reported, line = reports.get(rank, (None, ""))
        if reported != code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            is_told = code == -signal.SIGTERM  # by the launcher, after another one failed
            ends.append((2 if is_told else 1, rank, RankLost.exit_code, how))
        else:
            order = 3 if code > 128 else 2 if code == RankLost.exit_code else int(code == 1)
            # The rank that it waited for was killed after it, and could not say anything.
            ends.append((0.5 if "Timed out" in line else order, rank, code, line))
    if not ends:
        assert stopped is not None
        name = signal.Signals(stopped).name
        return InvformerError(f"stopped by {name} before anything was saved", 128 + stopped)
    order, rank, code, line = min(ends)
    if order in (0, 3):
        return InvformerError(line, code)
    return RankLost(
        f"rank {rank}: {line}; all were stopped, the same command continues from the last "
        "checkpoint"
    )
