"""Rows: complete, in order, checked, and copied to the host once for all tensors."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from invformer.errors import CertificateViolation
from invformer.training.callbacks import Speed
from invformer.training.rows import Rows, record, rows_of

BRANCH = "lipschitz_branches/block_00/attention"


def trainer_with(*callbacks: Rows) -> Any:
    sent: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(log_metrics=lambda row, step: sent.append((step, row)))
    return SimpleNamespace(
        loggers=[logger], callbacks=list(callbacks), sanity_checking=False, sent=sent,
        lightning_module=None,
    )  # fmt: skip


def test_rows_carry_their_own_step_and_everything_recorded_for_it() -> None:
    trainer = trainer_with()
    record(trainer, 1, {"b": torch.tensor(2.5)})
    record(trainer, 0, {"a": 1.0})
    record(trainer, 1, {"c": torch.tensor(4)})
    rows_of(trainer).send(trainer, before=1)
    assert trainer.sent == [(0, {"a": 1.0})]
    rows_of(trainer).send(trainer)
    assert trainer.sent == [(0, {"a": 1.0}), (1, {"b": 2.5, "c": 4.0})]


def test_one_key_more_than_a_vector_has_entries_is_that_of_the_largest() -> None:
    trainer = trainer_with()
    record(trainer, 0, {("a", "b", "most"): torch.tensor([3.0, 2.0]), ("c", "d"): torch.ones(2)})
    record(trainer, 1, {("a", "b", "most"): torch.tensor([3.0, torch.nan])})
    rows = rows_of(trainer).flush(trainer)
    assert rows[0] == {"a": 3.0, "b": 2.0, "most": 3.0, "c": 1.0, "d": 1.0}
    assert math.isnan(rows[1]["most"])


@pytest.mark.parametrize("kind", ["estimate", "local_bound"])
def test_an_estimate_above_its_bound_stops_the_run_and_keeps_the_evidence(
    tmp_path, kind: str
) -> None:
    rows = Rows(25, tmp_path / "violation.json", torch.tensor([[1, 2, 3]]))
    trainer = trainer_with(rows)
    row = {f"{BRANCH}/{kind}": 0.8, f"{BRANCH}/bound": 0.7}
    record(trainer, 7, row)
    with pytest.raises(CertificateViolation, match=rf"step 7: {BRANCH}: {kind} 0\.8") as error:
        rows.send(trainer)
    assert error.value.exit_code == 6
    evidence = json.loads((tmp_path / "violation.json").read_text())
    assert evidence == {"step": 7, "row": row, "probe": [[1, 2, 3]]}


def test_time_between_records_counts_and_that_of_validations_does_not(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed, trainer = Speed(every=2), trainer_with()
    trainer.world_size, trainer.accumulate_grad_batches, trainer.is_last_batch = 1, 1, False
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=0))
    batch = (torch.zeros(4, 25),)

    def step(number: int, seconds: float) -> None:
        trainer.global_step = number
        speed.on_train_batch_start()
        now[0] += seconds
        speed.on_train_batch_end(trainer, None, None, batch, number)

    speed.on_train_start()
    for number in (1, 2):
        step(number, 1.0)
    now[0] += 8.0  # waiting for the device, which computes what was only sent to it
    for number in (3, 4):
        step(number, 1.0)
    speed.on_validation_start(trainer, Any)
    now[0] += 100.0
    for number in (5, 6):
        step(number, 1.0)
    rates = [row["perf/characters_per_second"] for row in rows_of(trainer).pending.values()]
    assert rates == [100.0, 20.0, 100.0]
