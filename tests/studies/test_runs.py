"""Commands that a study runs."""

import signal

import pytest

from invformer.errors import InvformerError
from studies import runs

PROGRAM = """
import os, signal, sys, time
number = int(sys.argv[1])
signal.signal(number, lambda *_: sys.exit(77))  # saved
os.kill(os.getppid(), number)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_study_stops_the_run_that_it_waits_for_first(
    number: signal.Signals, tmp_path, monkeypatch
) -> None:
    (tmp_path / "run.py").write_text(PROGRAM)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(InvformerError, match="exit code 77"):
            runs.call("run.py", str(int(number)))
    finally:
        signal.signal(number, before)
    assert heard == [number]
