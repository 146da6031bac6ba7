"""A run continues from its own newest whole checkpoint on its own text, or says why not."""

import logging
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import OmegaConf

from invformer.errors import CheckpointError, DataError, Interrupted, InvformerError
from invformer.runs.checkpoint import MODEL, STATE, STATE_TENSORS, WEIGHTS
from invformer.runs.run_log import read_rows
from invformer.runs.saving import Checkpoints
from invformer.training.fit import fit
from tests.runs.hostile import edit_json, flipped
from tests.support.saved_runs import write_checkpoint
from tests.support.small_runs import TEXT, StopAt, built, newest, options, write_text

pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")
SHORT = ("trainer.max_steps=6", "trainer.val_every=2", "monitor.inversion=false")
DROPOUT = ("model=dot_product", "model.dropout=0.2")


def train(folder: Path, *more: str, until: int | None = None, stop_at: int | None = None) -> None:
    """Train the run "a" on the text in a folder, which is written there if it has none."""
    if not (folder / "squares.txt").exists():
        write_text(folder)
    stop = [] if stop_at is None else [StopAt(stop_at, signal.SIGTERM)]
    run = built(options(folder, "a", *SHORT, *more), *stop)
    if until is not None:
        run.trainer.fit_loop.epoch_loop.max_steps = until
    fit(run)


def trained(folder: Path, until: int | None = None) -> Path:
    """A folder with a text and the run on it; in float32, as the application runs."""
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("invformer.training.fit.plot_run", lambda _, path, *rest: path.touch())
        train(folder, until=until)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with a text and a run of six steps that was never interrupted."""
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory) -> Path:
    """The same, stopped after four steps."""
    return trained(tmp_path_factory.mktemp("half"), until=4)


@pytest.fixture
def stopped(half_way, tmp_path) -> Path:
    """A copy of the run that was stopped, on the very text."""
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        edit_json(path, MODEL, lambda m: m["config"]["data"].update(path=f"{tmp_path}/squares.txt"))
    return tmp_path


def column(run: Path, key: str) -> list[float]:
    """The numbers of one key in all rows of a run."""
    return [row[key] for row in read_rows(run / "metrics.jsonl") if key in row]


def validated(run: Path) -> list[int]:
    """The steps after which a run was validated."""
    return [row["step"] for row in read_rows(run / "metrics.jsonl") if "val/bpc" in row]


def differing(one: Path, other: Path) -> set[str]:
    """What differs, in any bit, of two runs' losses and newest checkpoints.

    Weights; optimiser and random generators; schedule, positions and monitors.
    """
    first, second = (newest(run).path for run in (one, other))
    names = (WEIGHTS, STATE_TENSORS, STATE)
    found = {name for name in names if (first / name).read_bytes() != (second / name).read_bytes()}
    losses = (column(run, "train/nats") for run in (one, other))
    return found | ({"losses"} if next(losses) != next(losses) else set())


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
    train(tmp_path, *more, "run.name=once")
    train(tmp_path, *more, until=4)
    train(tmp_path, *more)
    assert differing(tmp_path / "a", tmp_path / "once") == set()
    assert validated(tmp_path / "a")[-2:] == [3, 5]
    assert newest(tmp_path / "a").step == 6
    kind = newest(tmp_path / "a").metadata.get("certificate")
    assert kind is None if "model=dot_product" in more else kind["norm"] == "token_max"
    rows, left = (tmp_path / "a" / "metrics.jsonl").read_bytes(), newest(tmp_path / "a").path
    train(tmp_path, *more)  # of which nothing is left to do
    assert newest(tmp_path / "a").path == left
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == rows


def test_a_signal_between_the_batches_of_a_step_lets_it_end_and_costs_no_bit(tmp_path) -> None:
    dropout = ("model.head_dropout=0.2", "model.dropout=0.1")
    more = (*dropout, "trainer.accumulate=3", "monitor.enabled=false")
    train(tmp_path, *more, "run.name=once")
    with pytest.raises(Interrupted):
        train(tmp_path, *more, stop_at=9)  # after the first batch of the fourth step
    assert newest(tmp_path / "a").step == 4
    train(tmp_path, *more)
    # In STATE Lightning counts validations since the run was resumed.
    assert differing(tmp_path / "a", tmp_path / "once") <= {STATE}


def test_a_run_shorter_than_an_interval_is_validated_and_made_longer(tmp_path, capsys) -> None:
    train(tmp_path, "trainer.val_every=5", "trainer.max_steps=3")
    assert validated(tmp_path / "a") == [2]
    assert "schedule" not in capsys.readouterr().out
    train(tmp_path, "trainer.val_every=5", "trainer.max_steps=7")
    assert validated(tmp_path / "a") == [2, 4, 6]
    said = capsys.readouterr().out
    assert (
        "on the schedule of the new settings optim.muon_lr goes from 0.00e+00 to 1.50e-02 and "
        in said
    )


def test_a_signal_after_the_last_step_leaves_a_validation_to_be_made_up(tmp_path) -> None:
    train(tmp_path, "trainer.val_every=4", "run.name=once")
    with pytest.raises(Interrupted):
        train(tmp_path, "trainer.val_every=4", stop_at=5)
    assert newest(tmp_path / "a").step == 6
    train(tmp_path, "trainer.val_every=4")
    assert validated(tmp_path / "a") == [3, 5]
    assert differing(tmp_path / "a", tmp_path / "once") <= {STATE}


def test_a_damaged_newest_checkpoint_costs_one_interval(whole, stopped, caplog) -> None:
    damaged = newest(stopped / "a").path / "weights.safetensors"
    damaged.write_bytes(flipped(damaged.read_bytes()))
    with caplog.at_level(logging.WARNING):
        train(stopped)
    (warning,) = [r.message for r in caplog.records if "continuing from" in r.message]
    assert "step-00000004" in warning
    assert "continuing from step-00000002" in warning
    assert differing(stopped / "a", whole / "a") == set()


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
def test_a_changed_text_is_refused_with_code_3(stopped, change: Callable[[str], str]) -> None:
    (stopped / "squares.txt").write_text(change(TEXT))
    with pytest.raises(DataError, match="the text changed since the run began") as error:
        train(stopped)
    assert error.value.exit_code == 3
    assert newest(stopped / "a").step == 4


def test_fewer_steps_than_a_run_has_taken_are_refused_and_change_nothing(stopped) -> None:
    run = stopped / "a"
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=r"is at step 4, past trainer\.max_steps=3: ask for"):
        train(stopped, "trainer.max_steps=3")
    assert (run / "config.yaml").read_bytes() == before
    train(stopped, "trainer.max_steps=7")
    assert OmegaConf.load(run / "config.yaml").trainer.max_steps == 7


@pytest.mark.parametrize(("batch", "more"), [(3, ("monitor.flush_every=9",)), (5, ())])
def test_a_run_whose_folder_is_renamed_ends_and_makes_nothing_at_the_old_place(
    whole, tmp_path, batch: int, more: tuple[str, ...]
) -> None:
    write_text(tmp_path)
    words = options(tmp_path, "a", *SHORT, *more)

    def rename(*arguments: Any) -> None:
        if arguments[-1] == batch:
            (tmp_path / "a").rename(tmp_path / "renamed")

    with pytest.raises(CheckpointError, match=r"/a was renamed or deleted while this run was on"):
        fit(built(words, LambdaCallback(on_train_batch_end=rename)))
    assert not (tmp_path / "a").exists()
    assert (
        column(tmp_path / "renamed", "train/nats")
        == (column(whole / "a", "train/nats")[: batch // 2 * 2])
    )


FREE = (
    "trainer.eval_batch_size=3", "data.split=train", "data.unknown=refuse", "monitor.every=2",
    "monitor.length=5", "monitor.num_sequences=2", "monitor.inversion=true",
    "monitor.flush_every=1", "trainer.sample_length=5",
)  # fmt: skip


@pytest.mark.parametrize("more", [FREE, ("monitor.enabled=false",)])
def test_settings_that_change_no_trained_number_may_change(
    whole, stopped, more: tuple[str, ...], caplog
) -> None:
    train(stopped, *more)
    assert differing(stopped / "a", whole / "a").isdisjoint({WEIGHTS, "losses"})
    said = [r.message for r in caplog.records]
    assert said == (
        ["the Lipschitz probe: its vectors do not fit the model: estimates start anew"]
        if more == FREE
        else []
    )


def test_settings_that_move_the_rounding_may_change_with_one_line(whole, stopped, caplog) -> None:
    words = (
        "trainer.val_every=3", "trainer.checkpoint_activations=true", "trainer.num_threads=1",
        "model.attention_kernel=math",
    )  # fmt: skip
    train(stopped, *words)
    (line,) = [r.message for r in caplog.records]
    assert all(f"{word.partition('=')[0]} was " in line for word in words)
    assert line.endswith("; it continues, not bit for bit")
    losses = column(whole / "a", "train/nats")
    assert column(stopped / "a", "train/nats") == pytest.approx(losses, rel=1e-5)


CHANGED = (
    "data.batch_size=4", "optim.lr=1e-4", "optim.muon_lr=1e-3", "optim.weight_decay=0.3",
    "optim.grad_clip=0.1", "optim.betas=[0.8,0.9]", "model.head_dropout=0.1",
    "optim.warmup_steps=0",
)  # fmt: skip


def test_on_request_a_run_goes_on_with_other_rates_batches_decay_clipping_and_dropout(
    stopped, caplog, capsys
) -> None:
    with pytest.raises(
        CheckpointError, match=r"batch_size was 8, now 4.*, or add run\.change=true"
    ):
        train(stopped, *CHANGED)
    train(stopped, *CHANGED, "run.change=true")
    (line,) = [r.message for r in caplog.records]
    assert "from step 4 on model.head_dropout was 0.0, now 0.1; data.batch_size was 8" in line
    said = capsys.readouterr().out
    assert "optim.lr goes from 1.73e-03 to 2.50e-05" in said, said[300:900]
    (changed,) = newest(stopped / "a").metadata["changes"]
    assert changed["step"] == 4
    assert changed["from_to"].keys() == {word.partition("=")[0] for word in CHANGED}
    group = newest(stopped / "a").read_state()["optimizer_states"][0]["param_groups"]
    assert (group[0]["weight_decay"], group[-1]["betas"]) == (0.3, (0.8, 0.9))
    assert column(stopped / "a", "optim/lr")[4] == 1e-4 * (1 + math.cos(math.pi * 4 / 6)) / 2
    train(stopped, *CHANGED, "trainer.max_steps=8", "run.change=true")
    assert newest(stopped / "a").metadata["changes"] == [changed]


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
def test_what_cannot_change_is_refused_with_a_way_that_works(stopped, word: str, way: str) -> None:
    with pytest.raises(CheckpointError, match=way):
        train(stopped, word, "run.change=true")


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
    stopped, change: Callable[[dict, dict], Any]
) -> None:
    saved = newest(stopped / "a")
    metadata, state = dict(saved.metadata), saved.read_state()
    weights = safetensors.torch.load_file(saved.path / WEIGHTS)
    shutil.rmtree(saved.path)
    change(metadata, state)
    write_checkpoint(saved.path, metadata, weights, state)
    with pytest.raises(InvformerError) as error:
        train(stopped)
    assert error.value.exit_code == 4, error.value
    assert "\n" not in str(error.value)
    assert (newest(stopped / "a").path / STATE).exists()
