"""Which settings and states a run continues with, and which are refused."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from invformer.errors import CheckpointError, InvformerError
from invformer.runs.checkpoint import STATE, WEIGHTS
from tests.runs.resuming import column, losses, newest, train
from tests.support.saved_runs import write_checkpoint

pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")


@pytest.fixture
def folder(stopped_run) -> Path:
    """Of a run that was stopped after four steps."""
    return stopped_run


FREE = (
    "trainer.eval_batch_size=3", "data.split=train", "data.unknown=refuse", "monitor.every=2",
    "monitor.length=5", "monitor.num_sequences=2", "monitor.inversion=true",
    "monitor.flush_every=1", "trainer.sample_length=5",
)  # fmt: skip


@pytest.mark.parametrize("more", [FREE, ("monitor.enabled=false",)])
def test_settings_that_change_no_trained_number_may_change(
    whole, folder, more: tuple[str, ...], caplog
) -> None:
    train(folder, *more)
    assert (newest(folder).path / WEIGHTS).read_bytes() == (
        newest(whole).path / WEIGHTS
    ).read_bytes()
    assert losses(folder) == losses(whole)
    said = [r.message for r in caplog.records]
    assert said == (
        ["the Lipschitz probe: its vectors do not fit the model: estimates start anew"]
        if more == FREE
        else []
    )


def test_settings_that_move_the_rounding_may_change_with_one_line(whole, folder, caplog) -> None:
    words = (
        "trainer.val_every=3", "trainer.checkpoint_activations=true", "trainer.num_threads=1",
        "model.attention_kernel=math",
    )  # fmt: skip
    train(folder, *words)
    (line,) = [r.message for r in caplog.records]
    assert all(f"{word.partition('=')[0]} was " in line for word in words)
    assert line.endswith("; it continues, not bit for bit")
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)


CHANGED = (
    "data.batch_size=4", "optim.lr=1e-4", "optim.muon_lr=1e-3", "optim.weight_decay=0.3",
    "optim.grad_clip=0.1", "optim.betas=[0.8,0.9]", "model.head_dropout=0.1",
    "optim.warmup_steps=0",
)  # fmt: skip


def test_on_request_a_run_goes_on_with_other_rates_batches_decay_clipping_and_dropout(
    folder, caplog, capsys
) -> None:
    with pytest.raises(
        CheckpointError, match=r"batch_size was 8, now 4.*, or add run\.change=true"
    ):
        train(folder, *CHANGED)
    train(folder, *CHANGED, "run.change=true")
    (line,) = [r.message for r in caplog.records]
    assert "from step 4 on model.head_dropout was 0.0, now 0.1; data.batch_size was 8" in line
    said = capsys.readouterr().out
    assert "optim.lr goes from 1.73e-03 to 2.50e-05" in said, said[300:900]
    (changed,) = newest(folder).metadata["changes"]
    assert changed["step"] == 4
    assert changed["from_to"].keys() == {word.partition("=")[0] for word in CHANGED}
    group = newest(folder).read_state()["optimizer_states"][0]["param_groups"]
    assert (group[0]["weight_decay"], group[-1]["betas"]) == (0.3, (0.8, 0.9))
    assert column(folder, "optim/lr")[4] == 1e-4 * (1 + math.cos(math.pi * 4 / 6)) / 2
    train(folder, *CHANGED, "trainer.max_steps=8", "run.change=true")
    assert newest(folder).metadata["changes"] == [changed]


ANEW = r"or start a new run from its weights: run\.name=NEW init_from=/"


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("run.seed=1", ANEW),
        ("optim=adamw", ANEW),
        ("optim.ema_decay=0.9", ANEW),
        ("model.d_model=32", r"or choose another run\.name \(init_from= would bring"),
    ],
)
def test_what_cannot_change_is_refused_with_a_way_that_works(folder, word: str, way: str) -> None:
    with pytest.raises(CheckpointError, match=way):
        train(folder, word, "run.change=true")


def group(state: dict) -> dict:
    return state["optimizer_states"][0]["param_groups"][-1]


def memory(state: dict) -> dict:
    return state["optimizer_states"][0]["state"][group(state)["params"][0]]


CHANGES: dict[str, Callable[[dict, dict], Any]] = {
    "moments of another shape": lambda m, s: memory(s).update(exp_avg=torch.ones(1)),
    "moments that are missing": lambda m, s: memory(s).pop("exp_avg_sq"),
    "another weight decay": lambda m, s: group(s).update(weight_decay=9.0),
    "no optimiser": lambda m, s: s.update(optimizer_states=[]),
    "a schedule of ten times the rate": lambda m, s: s["lr_schedulers"][0].update(
        base_lrs=[1.0, 1.0]
    ),
    "a schedule that begins anew": lambda m, s: s["lr_schedulers"][0].update(last_epoch=0),
    "no random state": lambda m, s: s["callbacks"].pop("RandomState"),
    "a random state too short": lambda m, s: s["callbacks"]["RandomState"].update(
        cpu=torch.zeros(3, dtype=torch.uint8)
    ),
    "a callback more": lambda m, s: s["callbacks"].update(ModelCheckpoint={"dirpath": "/"}),
    "no loops": lambda m, s: s.update(loops={}),
    "loops of another step": lambda m, s: m.update(step=3),
    "another vocabulary": lambda m, s: m.update(vocabulary={"characters": "abc"}),
    "another configuration": lambda m, s: m["config"]["optim"].update(lr=1.0),
}


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in CHANGES.items()])
def test_a_state_of_another_run_is_refused_with_code_4(
    folder, change: Callable[[dict, dict], Any]
) -> None:
    saved = newest(folder)
    metadata, state = dict(saved.metadata), saved.read_state()
    weights = safetensors.torch.load_file(saved.path / WEIGHTS)
    shutil.rmtree(saved.path)
    change(metadata, state)
    write_checkpoint(saved.path, metadata, weights, state)
    with pytest.raises(InvformerError) as error:
        train(folder)
    assert error.value.exit_code == 4, error.value
    assert "\n" not in str(error.value)
    assert (newest(folder).path / STATE).exists()
