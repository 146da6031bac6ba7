"""How programs end: one line on standard error and a code for everything that can go wrong."""

import errno
import os
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import evaluate
import train
from invformer import errors
from invformer.build.run import refuse_missing_devices
from invformer.config import load_config
from invformer.exit import guarded


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


FAILURES = {
    "done": (lambda: None, 0, ""),
    "a bug": (raising(KeyError("x")), 1, "a bug in invformer: KeyError: 'x' (test_exit.py:"),
    "configuration": (raising(errors.ConfigurationError("model.x: no")), 2, "model.x: no"),
    "data": (raising(errors.DataError("a.txt: no")), 3, "a.txt: no"),
    "checkpoint": (raising(errors.CheckpointError("a: no")), 4, "a: no"),
    "not finite": (raising(errors.NonFiniteError("step 3: no")), 5, "step 3: no"),
    "violation": (raising(errors.CertificateViolation("step 3: no")), 6, "step 3: no"),
    "storage": (raising(errors.StorageError("a: no")), 7, "a: no"),
    "a full disk": (
        raising(OSError(errno.ENOSPC, "No space left on device", "/a/b")),
        7,
        "/a/b: No",
    ),
    "a file limit": (raising(OSError(errno.EFBIG, "File too large")), 7, "File too large"),
    "Python's memory": (raising(MemoryError()), 8, "out of memory: lower data.batch_size"),
    "a device's memory": (
        raising(torch.OutOfMemoryError("CUDA out of memory")),
        8,
        "out of memory",
    ),
    "the host's memory": (lambda: torch.empty(10**15), 8, "out of memory: lower data.batch_size"),
    "a size beyond all memory": (lambda: torch.empty(2**62, 4), 8, "out of memory"),
    "a lost rank": (raising(errors.RankLost("rank 1 died")), 9, "rank 1 died"),
    "Ctrl-C": (raising(KeyboardInterrupt()), 130, "interrupted"),
    "SIGTERM": (raising(errors.Interrupted(15)), 143, "the state is saved"),
    "two lines": (raising(errors.DataError("one\ntwo")), 3, "one two"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_whatever_happens_has_its_exit_code_and_at_most_one_line(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work, code, message = FAILURES[what]
    assert guarded(work, debug=False) == code
    captured = capsys.readouterr().err
    assert message in captured
    assert captured.count("\n") == (1 if code else 0)
    assert captured.startswith("error: " if code else "")


@pytest.mark.parametrize("what", ["a bug", "data", "the host's memory"])
def test_debugging_adds_the_traceback(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    work, code, _ = FAILURES[what]
    assert guarded(work, debug=True) == code
    captured = capsys.readouterr().err
    assert captured.startswith("Traceback")
    assert captured.splitlines()[-1].startswith("error: ")


def test_a_connection_error_outside_a_rank_is_no_lost_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
    monkeypatch.delenv("INVFORMER_RANK_LINK", raising=False)
    assert guarded(raising(error), debug=False) == 1
    reading, writing = os.pipe()
    monkeypatch.setenv("INVFORMER_RANK_LINK", f"{reading},{writing}")
    assert guarded(raising(error), debug=False) == 9
    assert b'"end": 9' in os.read(reading, 1000)  # said to the supervisor, not to the terminal
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("program", "words", "code"),
    [(train, ["data=text_file", "data.path=missing"], 3), (evaluate, ["checkpoint=missing"], 4)],
    ids=["train", "evaluate"],
)
@pytest.mark.parametrize("debug", [False, True])
def test_both_programs_know_the_debug_flag(
    program: ModuleType,
    words: list[str],
    code: int,
    debug: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "stop_on_signals", lambda: None)  # this process keeps its own
    monkeypatch.setattr(sys, "argv", ["x", *words, *(["--debug"] if debug else [])])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines) > 1) == debug
    assert lines[-1].startswith("error: ")


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps", "auto"])
def test_devices_that_are_not_there_are_a_configuration_error(
    accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(accelerator == "auto"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    config = load_config([f"trainer.accelerator={accelerator}", "trainer.devices=2"])
    with pytest.raises(errors.ConfigurationError, match=r"trainer\.accelerator: 2 devices"):
        refuse_missing_devices(config.trainer)
    refuse_missing_devices(load_config(["trainer.accelerator=cpu", "trainer.devices=2"]).trainer)
