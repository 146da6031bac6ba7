"""Several processes end together: with one line, one exit code, and nobody left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from invformer.processes.launcher import conclusion
from invformer.runs.run_log import read_rows
from tests.support.processes import ROOT
from tests.support.small_runs import DROPOUT, difference, options

PROGRAM, TRAIN = "tests.reliability.rank_program", "tests.reliability.broken_train"


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ranks(folder: Path) -> list[int]:
    """The process numbers of both ranks, once they run."""
    files = [folder / "0", folder / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def await_end(pids: list[int]) -> None:
    """Until all processes are gone; one that nobody waited for counts as gone."""
    for pid in pids:
        with suppress(OSError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        ("die", 9, "rank 1: was ended by SIGKILL"),
        ("leave", 9, "rank 1: ended with 17"),
        ("raise", 9, "rank 1: a bug in invformer: KeyError: 'what nobody expected'"),
        ("explain", 3, "text.txt: cannot be read"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_line_and_one_code(
    zygote, tmp_path, behaviour: str, code: int, message: str
) -> None:
    zygote.start([behaviour, str(tmp_path)], program=PROGRAM)
    pids, ended = ranks(tmp_path), zygote.wait()
    assert ended.code == code, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    await_end(pids)


GONE = "another process of the run is gone"


@pytest.mark.parametrize(
    ("reports", "codes", "stopped", "code", "message"),
    [
        ({1: (3, "no text")}, {1: 3}, None, 3, "no text"),
        ({0: (9, GONE), 1: (1, "a bug")}, {0: 9, 1: 1}, None, 9, "rank 1: a bug; all were stopped"),
        ({0: (9, GONE)}, {0: 9, 1: -9}, None, 9, "rank 1: was ended by SIGKILL"),
        ({0: (9, f"{GONE} (Timed out)")}, {0: 9, 1: -9}, None, 9, "rank 0: another process of"),
        ({0: (143, "told"), 1: (8, "memory")}, {0: 143, 1: 8}, None, 8, "memory"),
        ({0: (143, "told")}, {0: 143, 1: 17}, None, 9, "rank 1: ended with 17"),
        ({0: (143, "saved"), 1: (143, "saved")}, {}, 15, 143, "saved"),
        ({}, {}, 15, 143, "stopped by SIGTERM before anything was saved"),
    ],
)
def test_the_line_of_a_run_is_that_of_the_rank_that_knows_most(
    tmp_path, reports: dict, codes: dict, stopped: int | None, code: int, message: str
) -> None:
    for rank, report in reports.items():
        (tmp_path / str(rank)).write_text(json.dumps(report))
    (tmp_path / "2").write_text("[9, ")  # a rank that was killed while it wrote
    error = conclusion(tmp_path, codes, stopped)
    assert error.exit_code == code
    assert str(error).startswith(message)


def test_ranks_that_finish_end_with_zero(zygote, tmp_path) -> None:
    ended = zygote.run(["finish", str(tmp_path)], program=PROGRAM)
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize(
    ("number", "to_all"),  # as a cluster's scheduler sends it
    [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
)
def test_a_signal_reaches_every_rank_and_each_may_save(
    zygote, tmp_path, number: signal.Signals, to_all: bool
) -> None:
    launcher = zygote.start(["be told", str(tmp_path)], program=PROGRAM)
    pids = ranks(tmp_path)
    time.sleep(0.2)
    for pid in (launcher, *pids) if to_all else (launcher,):
        os.kill(pid, number)
    ended = zygote.wait()
    assert ended.code == 128 + number
    assert ended.stderr.startswith(f"error: interrupted at step 7 by {number.name}, saved")
    assert ended.stderr.count("\n") == 1
    await_end(pids)


def test_ranks_end_when_their_launcher_is_killed(zygote, tmp_path) -> None:
    launcher = zygote.start(["wait", str(tmp_path)], program=PROGRAM)
    pids = ranks(tmp_path)
    os.kill(launcher, signal.SIGKILL)
    zygote.wait()
    await_end(pids)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("die", "rank 1: was ended by SIGKILL"),
        ("raise", "ValueError: broken on purpose"),
        ("hang", "another process of the run is gone"),
        ("stop", "another process of the run is gone"),
    ],
)
def test_training_with_a_broken_rank_ends_with_code_9(root, how: str, message: str) -> None:
    arguments = options(
        root, f"ranks-{how}", "trainer.devices=2", "trainer.rank_timeout=15", model=DROPOUT
    )
    process = start(TRAIN, how, *arguments)
    while not (children := ranks_below(process.pid)) and process.poll() is None:
        time.sleep(0.05)
    _, stderr = process.communicate(timeout=800)
    assert process.returncode == 9, stderr
    assert stderr.startswith("error: rank")
    assert message in stderr
    assert stderr.count("\n") == 1
    await_end(children)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_in_two_processes_is_stopped_and_continued_to_the_same_bits(root) -> None:
    finish(root, "whole", "trainer.devices=2")
    stop(root, "parts", "trainer.devices=2")
    finish(root, "parts", "trainer.devices=2")
    assert difference(root / "whole", root / "parts") is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_continues_with_another_number_of_ranks(root) -> None:
    exact = "trainer.precision=64-true", "trainer.accumulate=2"
    finish(root, "one", *exact)
    stop(root, "mixed", *exact, "trainer.devices=2")
    finish(root, "mixed", *exact)
    for key in ("train/nats", "val/bpc"):
        rows = (read_rows(root / name / "metrics.jsonl") for name in ("one", "mixed"))
        one, mixed = ([row[key] for row in run if key in row] for run in rows)
        assert mixed == pytest.approx(one, rel=1e-12)


def finish(root: Path, name: str, *more: str) -> None:
    """Train to the end."""
    process = start(TRAIN, "not", *options(root, name, *more, model=DROPOUT))
    _, stderr = process.communicate(timeout=800)
    assert process.returncode == 0, stderr


def stop(root: Path, name: str, *more: str) -> None:
    """Train until there are rows, then stop by a signal."""
    process = start(TRAIN, "slowly", *options(root, name, *more, model=DROPOUT))
    while not (root / name / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    process.terminate()
    _, stderr = process.communicate(timeout=800)
    assert process.returncode == 143, stderr
    assert stderr.count("\n") == 1


def ranks_below(pid: int) -> list[int]:
    """The children of a process, once there are two."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(word) for word in file.read_text().split()] if file.exists() else []
    return children if len(children) == 2 else []


def agents(name: str, root: Path, how: str) -> list[subprocess.Popen[str]]:
    """Two torchrun agents with one rank each, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = [
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=localhost",
        f"--rdzv-endpoint=localhost:{port}", "-m", TRAIN, how,
        *options(root, name, model=DROPOUT),
    ]  # fmt: skip
    return [start("torch.distributed.run", *words) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_of_torchrun_train_and_continue_after_one_was_killed(root) -> None:
    for agent in agents("agents", root, "not"):
        _, stderr = agent.communicate(timeout=400)
        assert agent.returncode == 0, stderr
    first, second = agents("agents-killed", root, "slowly")
    while not (root / "agents-killed" / "checkpoints").exists() and first.poll() is None:
        time.sleep(0.02)
    second.kill()
    second.communicate()
    _, stderr = first.communicate(timeout=400)
    assert first.returncode != 0
    assert stderr.count("another process of the run is gone") <= 1
    for agent in agents("agents-killed", root, "not"):
        _, stderr = agent.communicate(timeout=400)
        assert agent.returncode == 0, stderr
    assert difference(root / "agents", root / "agents-killed") is None
