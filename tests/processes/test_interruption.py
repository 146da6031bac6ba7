"""What was measured before a signal is checked before the state is saved, in every process."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from invformer.errors import CertificateViolation, CheckpointError, NonFiniteError, RankLost
from invformer.lipschitz.probe import LipschitzProbe
from invformer.processes import interruption
from invformer.processes.interruption import check_everywhere
from invformer.runs.files import LOCK
from invformer.training.fit import Run, fit
from invformer.training.module import CharLanguageModel
from invformer.training.rows import Rows
from tests.support.small_runs import StopAt, built, options

STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
BRANCH = "lipschitz_branches/block_00/attention"


def run_of(folder: Path, stop_at: int | None = None) -> Run:
    """Eight steps and two validations, with nothing flushed between these."""
    more = ("trainer.max_steps=8", "trainer.val_every=4", "monitor.flush_every=25")
    stop = [] if stop_at is None else [StopAt(stop_at, signal.SIGTERM, signal.SIGINT)]
    return built(options(folder, "a", *more), *stop)


@pytest.mark.parametrize("stop_at", [1, 2, 3])  # after the last of these, in a validation
def test_a_violation_that_waits_for_its_flush_when_a_signal_comes_ends_the_run_and_saves_nothing(
    folder, monkeypatch, stop_at: int
) -> None:
    true_values, count = LipschitzProbe.values, iter(range(1000))

    def values(probe: LipschitzProbe, *args: Any, **kwargs: Any) -> Tensor:
        found = true_values(probe, *args, **kwargs).clone()  # of inference mode
        if next(count) == 1:
            found[probe.names.index(BRANCH.removeprefix("lipschitz_branches/"))] = 99.0
        return found

    monkeypatch.setattr(LipschitzProbe, "values", values)
    run = run_of(folder, stop_at)
    with pytest.raises(CertificateViolation, match=f"step 1: {BRANCH}: estimate 99") as error:
        fit(run)
    assert error.value.exit_code == 6
    assert not run.directory.checkpoints.exists()
    evidence = json.loads((run.directory.path / "violation.json").read_text())
    assert evidence["step"] == 1
    assert evidence["row"][f"{BRANCH}/estimate"] == 99.0


def test_a_stopped_run_that_cannot_save_leaves_signals_as_they_were(folder) -> None:
    run = run_of(folder, stop_at=1)
    (run.directory.path / LOCK).unlink()  # so that saving is refused, amid Lightning's own cleaning
    before = [signal.getsignal(number) for number in STOPPING]
    with pytest.raises(CheckpointError, match="was deleted"):
        fit(run)
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_an_update_skipped_before_a_signal_ends_the_run(folder, monkeypatch) -> None:
    monkeypatch.setattr(CharLanguageModel, "refuses_at_once", lambda _: False)
    run = run_of(folder, stop_at=5)
    weight = run.module.model.head.weight
    weight.register_hook(lambda g: g / 0 if run.trainer.global_step == 5 else g)
    with pytest.raises(NonFiniteError, match=r"step 5: the gradient of head\.weight"):
        fit(run)
    assert [path.name for path in run.directory.checkpoints.iterdir()] == ["step-00000004"]


def check_in_one_of_two(row: dict[str, float]) -> None:
    """Check a pending row in one process of two."""
    rows = Rows()
    rows.pending[3] = {**row}
    trainer: Any = SimpleNamespace(world_size=2, loggers=[], lightning_module=None)
    check_everywhere(lambda: rows.send(trainer))


def test_all_processes_refuse_what_one_of_them_refuses(monkeypatch) -> None:
    sound = {f"{BRANCH}/estimate": 0.2, f"{BRANCH}/bound": 0.5}
    broken = {**sound, f"{BRANCH}/estimate": 99.0}
    for other in (0, 1):
        monkeypatch.setattr(
            interruption, "largest_of_processes", lambda own, other=other: max(own, other)
        )
        with pytest.raises(RankLost, match="another process") if other else nullcontext():
            check_in_one_of_two(sound)
        with pytest.raises(CertificateViolation, match=f"step 3: {BRANCH}: estimate 99"):
            check_in_one_of_two(broken)
