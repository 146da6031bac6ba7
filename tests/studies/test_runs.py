"""Commands that a study runs."""

import signal
from pathlib import Path

import pytest

from invformer.errors import InvformerError
from studies import runs


def test_a_signal_to_a_study_stops_the_run_that_it_waits_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
    (tmp_path / "run.py").write_text(program)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(InvformerError, match="exit code -15"):
            runs.call("run.py")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
