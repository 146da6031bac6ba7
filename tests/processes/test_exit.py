"""How programs end: one line on standard error and a code for everything that can go wrong."""

import errno
import logging
import os
import pty
from collections.abc import Callable

import pytest
import torch

from invformer import errors
from invformer.processes.console import Console, PrintableFormatter, lasting, printable
from invformer.processes.exit import guarded
from tests.support.processes import python


def raising(error: BaseException) -> Callable[..., None]:
    def work(*_: object) -> None:
        raise error

    return work


def interrupted_while_a_class_is_made() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise RuntimeError("Error calling __set_name__") from error


FAILURES = {
    "done": (lambda: None, 0, ""),
    "a bug": (raising(KeyError("x")), 1, "a bug in invformer: KeyError: 'x' (test_exit.py:"),
    "configuration": (raising(errors.ConfigurationError("model.x: no")), 2, "model.x: no"),
    "data": (raising(errors.DataError("a.txt: no")), 3, "a.txt: no"),
    "checkpoint": (raising(errors.CheckpointError("a: no")), 4, "a: no"),
    "not finite": (raising(errors.NonFiniteError("step 3: no")), 5, "step 3: no"),
    "violation": (raising(errors.CertificateViolation("step 3: no")), 6, "step 3: no"),
    "storage": (raising(errors.StorageError("a: no")), 7, "a: no"),
    "a full disk": (raising(OSError(errno.ENOSPC, "No space left", "/a/b")), 7, "/a/b: No space"),
    "a file limit": (raising(OSError(errno.EFBIG, "File too large")), 7, "File too large"),
    "Python's memory": (raising(MemoryError()), 8, "out of memory: halve data.batch_size"),
    "a device's memory": (raising(torch.OutOfMemoryError("CUDA: full")), 8, "out of memory: halve"),
    "the host's memory": (lambda: torch.empty(10**15), 8, "out of memory: halve data.batch_size"),
    "a size beyond all memory": (lambda: torch.empty(2**62, 4), 8, "out of memory"),
    "a lost rank": (raising(errors.RankLost("rank 1 died")), 9, "rank 1 died"),
    "Ctrl-C": (raising(KeyboardInterrupt()), 130, "interrupted"),
    "Ctrl-C in an import": (interrupted_while_a_class_is_made, 130, "interrupted"),
    "SIGTERM": (raising(errors.Interrupted(15, 3, "x")), 143, "interrupted at step 3 by SIGTERM"),
    "two lines": (raising(errors.DataError("one\ntwo")), 3, "one two"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_whatever_happens_has_its_exit_code_and_at_most_one_line(what: str, capsys) -> None:
    work, code, message = FAILURES[what]
    assert guarded(work, debug=False) == code
    captured = capsys.readouterr().err
    assert message in captured
    assert captured.count("\n") == (1 if code else 0)
    assert captured.startswith("error: " if code else "")


def test_a_connection_error_outside_a_rank_is_no_lost_rank(monkeypatch, tmp_path, capsys) -> None:
    error = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert guarded(raising(error), debug=False) == 1
    for name, value in (("TORCHELASTIC_RUN_ID", "a"), ("RANK", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert guarded(raising(error), debug=False) == 9  # under a torchrun of the user's
    assert capsys.readouterr().err.count("error: ") == 2
    monkeypatch.setenv("INVFORMER_REPORTS", str(tmp_path))
    assert guarded(raising(error), debug=False) == 9
    assert (tmp_path / "1").read_text().startswith('[9, "another process of the run is gone')
    assert capsys.readouterr().err == ""


NO, LOST, BUG = errors.DataError("x: no"), errors.RankLost("another is gone"), KeyError("x")
TOLD = errors.Interrupted(15, 3, "x")


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ([NO, NO], ["x: no", "x: no"]),
        ([LOST, LOST], ["another is gone"]),
        ([TOLD, TOLD], ["interrupted"]),
        ([LOST, TOLD, NO, BUG], ["another is gone", "x: no", "a bug"]),
    ],
)
def test_ranks_of_torchrun_say_what_each_has_and_once_that_all_were_stopped(
    ends: list[Exception], says: list[str], monkeypatch, capsys
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    for rank, error in enumerate(ends):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert guarded(raising(error), debug=False) == getattr(error, "exit_code", 1)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, says, strict=True))


def test_the_debug_flag_adds_the_traceback(command, capsys) -> None:
    assert command("evaluate", "checkpoint=missing", "--debug") == 4
    *traceback, last = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert last.startswith("error: ")


@pytest.mark.parametrize("open_pair", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_a_lost_console_becomes_the_null_device(open_pair: Callable[[], tuple[int, int]]) -> None:
    reader, writer = open_pair()
    console = Console(writer)
    assert console.write(b"read") == 4
    assert os.read(reader, 4) == b"read"
    os.close(reader)
    assert console.write(b"lost") == 4
    assert os.fstat(writer).st_rdev == os.stat(os.devnull).st_rdev
    os.close(writer)


def test_a_disk_that_takes_no_more_of_the_output_ends_nothing_and_is_told(capsys) -> None:
    with open("/dev/full", "wb") as full:
        console = Console(full.fileno())
        assert console.write(b"lost") == console.write(b"lost") == 4
    assert capsys.readouterr().err == (
        "standard output: No space left on device; what is printed from here on is lost\n"
    )


def test_a_program_that_only_prints_ends_when_nobody_reads_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit, match="141"):
        Console(writer, is_all=True).write(b"lost")
    os.close(writer)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_console_without_a_character_shows_its_number(errors: str) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="latin-1", errors=errors) as stream:
        same = lasting(stream)
        print("\u2264 \U0001f600 \u00e9", file=same)
        same.close()
    assert os.read(reader, 100) == b"\\u2264 \\U0001f600 \xe9\n"
    os.close(reader)


def test_errors_and_warnings_send_a_terminal_no_commands(capsys) -> None:
    owned = errors.DataError("a\x1b]0;owned\x07b: no such file")
    assert guarded(raising(owned), debug=False) == 3
    assert capsys.readouterr().err == "error: a\\x1b]0;owned\\x07b: no such file\n"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", ("\x1b[31m",), None)
    assert PrintableFormatter().format(record) == r"\x1b[31m"


@pytest.mark.parametrize(
    ("character", "shown"),
    [
        ("\u202e", r"\u202e"), ("\u2066", r"\u2066"), ("\u200b", r"\u200b"), ("\u200d", r"\u200d"),
        ("\ufeff", r"\ufeff"), ("\xad", r"\xad"), ("\u2028", r"\u2028"), ("\x85", r"\x85"),
        ("\u3164", r"\u3164"), ("\U000e0041", r"\U000e0041"), ("\ud800", r"\ud800"),
        *((same, same) for same in "a\n\té好😀\u0301\ufe0f\ufffd\xa0"),
    ],
)  # fmt: skip
def test_characters_that_control_reorder_or_hide_text_are_shown(character: str, shown: str) -> None:
    assert printable(f"a{character}b") == f"a{shown}b"


STOPPED = """
import os, signal, sys
from invformer.processes.exit import guarded, raised_signals, stop_on_signals

def work():
    if sys.argv[1] == "raised":
        with raised_signals():
            while True:
                os.kill(os.getpid(), signal.SIGINT)
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGINT)

stop_on_signals()
raise SystemExit(guarded(work, debug=False))
"""


@pytest.mark.parametrize("how", ["raised", "at once"])
def test_twenty_signals_are_one_line(how: str) -> None:
    done = python("-c", STOPPED, how)
    assert (done.returncode, done.stderr) == (130, "error: stopped by SIGINT\n")
