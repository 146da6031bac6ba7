"""A run continues from its own newest whole checkpoint on its own text, or says why not."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import OmegaConf

from invformer.errors import CheckpointError, DataError, Interrupted
from invformer.runs.checkpoint import STATE
from invformer.runs.saving import Checkpoints
from invformer.training.fit import fit
from tests.runs import resuming
from tests.runs.hostile import flipped
from tests.support import small_runs
from tests.support.small_runs import TEXT, built, write_text

pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")
DROPOUT = ("model=dot_product", "model.dropout=0.2")


@pytest.fixture
def folder(stopped_run) -> Path:
    """Of a run that was stopped after four steps."""
    return stopped_run


@pytest.mark.parametrize(
    "more",
    [
        ("trainer.val_every=4",),
        ("optim=adamw", "trainer.val_every=4", *DROPOUT),
        ("optim.ema_decay=0.9", "trainer.val_every=4", "trainer.accumulate=3"),
        ("trainer.precision=64-true", "optim.ema_decay=0.9"),
    ],
    ids=lambda more: more[0],
)
def test_every_recipe_resumes_at_the_same_bits_and_ends_with_a_validation_and_a_checkpoint(
    tmp_path, more: tuple[str, ...]
) -> None:
    resuming.train(tmp_path, *more, "run.name=once")
    resuming.train(tmp_path, *more, until=4)
    resuming.train(tmp_path, *more)
    resuming.assert_same(tmp_path)
    assert resuming.validated(tmp_path)[-2:] == [3, 5]
    assert resuming.newest(tmp_path).step == 6
    kind = resuming.newest(tmp_path).metadata.get("certificate")
    assert kind is None if "model=dot_product" in more else kind["norm"] == "token_max"
    rows, left = (tmp_path / "a" / "metrics.jsonl").read_bytes(), resuming.newest(tmp_path).path
    resuming.train(tmp_path, *more)  # of which nothing is left to do
    assert resuming.newest(tmp_path).path == left
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == rows


def test_a_signal_between_the_batches_of_a_step_lets_it_end_and_costs_no_bit(tmp_path) -> None:
    dropout = ("model.head_dropout=0.2", "model.dropout=0.1")
    more = (*dropout, "trainer.accumulate=3", "monitor.enabled=false")
    resuming.train(tmp_path, *more, "run.name=once")
    with pytest.raises(Interrupted):
        resuming.train(tmp_path, *more, stop_at=9)  # after the first batch of the fourth step
    assert resuming.newest(tmp_path).step == 4
    resuming.train(tmp_path, *more)
    resuming.assert_same(
        tmp_path, STATE
    )  # where Lightning counts validations since the run was resumed


def test_a_run_shorter_than_an_interval_is_validated_and_made_longer(tmp_path, capsys) -> None:
    resuming.train(tmp_path, "trainer.val_every=5", "trainer.max_steps=3")
    assert resuming.validated(tmp_path) == [2]
    assert "schedule" not in capsys.readouterr().out
    resuming.train(tmp_path, "trainer.val_every=5", "trainer.max_steps=7")
    assert resuming.validated(tmp_path) == [2, 4, 6]
    said = capsys.readouterr().out
    assert (
        "on the schedule of the new settings optim.muon_lr goes from 0.00e+00 to 1.50e-02 and "
        in said
    )


def test_a_signal_after_the_last_step_leaves_a_validation_to_be_made_up(tmp_path) -> None:
    resuming.train(tmp_path, "trainer.val_every=4", "run.name=once")
    with pytest.raises(Interrupted):
        resuming.train(tmp_path, "trainer.val_every=4", stop_at=5)
    assert resuming.newest(tmp_path).step == 6
    resuming.train(tmp_path, "trainer.val_every=4")
    assert resuming.validated(tmp_path) == [3, 5]
    resuming.assert_same(tmp_path, STATE)


def test_a_damaged_newest_checkpoint_costs_one_interval(whole, folder, caplog) -> None:
    damaged = resuming.newest(folder).path / "weights.safetensors"
    damaged.write_bytes(flipped(damaged.read_bytes()))
    with caplog.at_level(logging.WARNING):
        resuming.train(folder)
    (warning,) = [r.message for r in caplog.records if "continuing from" in r.message]
    assert "step-00000004" in warning
    assert "continuing from step-00000002" in warning
    assert resuming.contents(resuming.newest(folder)) == resuming.contents(resuming.newest(whole))
    assert resuming.losses(folder) == resuming.losses(whole)


def test_the_best_checkpoint_is_the_one_of_the_lowest_bpc(tmp_path) -> None:
    saved: list[str] = []
    callback, module = Checkpoints(tmp_path), Mock(spec=L.LightningModule)
    for step, bpc in enumerate([3.0, 2.0, 4.0, 2.5, math.nan]):
        trainer: Any = SimpleNamespace(
            should_stop=False, global_step=step, callback_metrics={"val/bpc": bpc}, strategy=Mock(),
            save_checkpoint=lambda path, storage_options: saved.append(path.name),
        )  # fmt: skip
        callback.on_validation_end(trainer, module)
    assert len(saved) == 5
    kept = {"best": 2.0, "best_name": saved[1], "num_worse": 3}
    assert callback.state_dict() == kept


@pytest.mark.parametrize("change", [lambda t: t.replace("7", "8"), lambda t: t + " "])
def test_a_changed_text_is_refused_with_code_3(folder, change: Callable[[str], str]) -> None:
    (folder / "squares.txt").write_text(change(TEXT))
    with pytest.raises(DataError, match="the text changed since the run began") as error:
        resuming.train(folder)
    assert error.value.exit_code == 3
    assert resuming.newest(folder).step == 4


def test_fewer_steps_than_a_run_has_taken_are_refused_and_change_nothing(folder) -> None:
    run = folder / "a"
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=r"is at step 4, past trainer\.max_steps=3: ask for"):
        resuming.train(folder, "trainer.max_steps=3")
    assert (run / "config.yaml").read_bytes() == before
    resuming.train(folder, "trainer.max_steps=7")
    assert OmegaConf.load(run / "config.yaml").trainer.max_steps == 7


@pytest.mark.parametrize(("batch", "more"), [(3, ("monitor.flush_every=9",)), (5, ())])
def test_a_run_whose_folder_is_renamed_ends_and_makes_nothing_at_the_old_place(
    whole, tmp_path, batch: int, more: tuple[str, ...]
) -> None:
    write_text(tmp_path)
    words = small_runs.options(tmp_path, "a", *resuming.SHORT, *more)

    def rename(*arguments: Any) -> None:
        if arguments[-1] == batch:
            (tmp_path / "a").rename(tmp_path / "renamed")

    with pytest.raises(CheckpointError, match=r"/a was renamed or deleted while this run was on"):
        fit(built(words, LambdaCallback(on_train_batch_end=rename)))
    assert not (tmp_path / "a").exists()
    assert resuming.losses(tmp_path, "renamed") == resuming.losses(whole)[: batch // 2 * 2]
