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
from omegaconf import OmegaConf

from invformer.errors import CheckpointError, DataError, Interrupted, InvformerError
from invformer.runs.checkpoint import (
    LEARNING,
    MODEL,
    STATE,
    STATE_TENSORS,
    WEIGHTS,
    Checkpoint,
    read_checkpoint,
)
from invformer.runs.run_log import read_rows
from invformer.runs.saving import Checkpoints
from invformer.training.fit import fit
from tests.runs.hostile import edit_json, flipped
from tests.support import small_runs
from tests.support.saved_runs import write_checkpoint
from tests.support.small_runs import TEXT, StopAt, built, write_text

pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")
SHORT = ("trainer.max_steps=6", "trainer.val_every=2", "monitor.inversion=false")
DROPOUT = ("model=dot_product", "model.dropout=0.2")


def train(folder: Path, *more: str, until: int | None = None, stop_at: int | None = None) -> None:
    """Train on the text in a folder, which is written there if it has none."""
    if not (folder / "squares.txt").exists():
        write_text(folder)
    stop = [] if stop_at is None else [StopAt(stop_at, signal.SIGTERM)]
    run = built(small_runs.options(folder, "a", *SHORT, *more), *stop)
    if until is not None:
        run.trainer.fit_loop.epoch_loop.max_steps = until
    fit(run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run of six steps that was never interrupted."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stopped after four steps."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("half")
    train(folder, until=4)
    return folder


@pytest.fixture
def folder(half_way: Path, tmp_path: Path) -> Path:
    """A copy of the run that was stopped, on the very text."""
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        edit_json(path, MODEL, lambda m: m["config"]["data"].update(path=f"{tmp_path}/squares.txt"))
    return tmp_path


def newest(folder: Path) -> Checkpoint:
    return small_runs.newest(folder / "a")


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Weights, optimiser, schedule, random generators, positions, monitors: every bit of them."""
    names = (WEIGHTS, STATE_TENSORS, STATE)
    return {name: (checkpoint.path / name).read_bytes() for name in names}


def column(folder: Path, key: str, name: str = "a") -> list[float]:
    """The numbers of one key in all rows of a run."""
    rows = read_rows(folder / name / "metrics.jsonl")
    return [row[key] for row in rows if key in row]


def losses(folder: Path, name: str = "a") -> list[float]:
    return column(folder, "train/nats", name)


def validated(folder: Path) -> list[int]:
    """The steps after which a run was validated."""
    rows = read_rows(folder / "a" / "metrics.jsonl")
    return [row["step"] for row in rows if "val/bpc" in row]


@pytest.mark.parametrize(
    "more",
    [
        ("optim=adamw", *DROPOUT),
        ("optim.ema_decay=0.9",),
        ("trainer.precision=64-true", "optim.ema_decay=0.9"),
    ],
    ids=lambda more: more[0],
)
def test_every_recipe_resumes_at_the_same_bits(
    whole: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    train(tmp_path, *more, "run.name=once")
    train(tmp_path, *more, until=4)
    train(tmp_path, *more)
    assert_same(tmp_path)
    # An average of the weights changes nothing for those that learn.
    assert (losses(tmp_path) == losses(whole)) == (more == ("optim.ema_decay=0.9",))


@pytest.mark.parametrize("model", [("model.head_dropout=0.2", "model.dropout=0.1"), DROPOUT])
def test_a_signal_between_the_batches_of_a_step_lets_it_end_and_costs_no_bit(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    more = (*model, "trainer.accumulate=3", "monitor.enabled=false")
    train(tmp_path, *more, "run.name=once")
    with pytest.raises(Interrupted):
        train(tmp_path, *more, stop_at=9)  # after the first batch of the fourth step
    assert newest(tmp_path).step == 4
    train(tmp_path, *more)
    assert_same(tmp_path, STATE)  # where Lightning counts validations since the run was resumed


def assert_same(folder: Path, *ignored: str) -> None:
    """Whether the run that was stopped ended as the one that was trained at once."""
    one, other = contents(newest(folder)), contents(small_runs.newest(folder / "once"))
    assert [name for name in one if one[name] != other[name] and name not in ignored] == []
    assert losses(folder) == losses(folder, "once")


@pytest.mark.parametrize("more", [(), ("trainer.accumulate=3", "optim.ema_decay=0.9")])
def test_a_run_ends_with_a_validation_and_a_checkpoint_wherever_its_last_step_is(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    more = (*more, "trainer.val_every=4")
    train(tmp_path, *more, "run.name=once")
    train(tmp_path, *more, until=4)
    train(tmp_path, *more)
    assert validated(tmp_path) == [3, 5]
    assert newest(tmp_path).step == 6
    assert newest(tmp_path).metadata["certificate"]["norm"] == "token_max"
    assert_same(tmp_path)
    rows = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    left = newest(tmp_path).path
    train(tmp_path, *more)
    assert newest(tmp_path).path == left
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == rows


def test_a_run_shorter_than_an_interval_is_validated_once_and_can_be_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "trainer.val_every=5", "trainer.max_steps=3")
    assert validated(tmp_path) == [2]
    assert "schedule" not in capsys.readouterr().out
    train(tmp_path, "trainer.val_every=5", "trainer.max_steps=7")
    assert validated(tmp_path) == [2, 4, 6]
    said = capsys.readouterr().out
    assert (
        "on the schedule of the new settings optim.muon_lr goes from 0.00e+00 to 1.50e-02 and "
        in said
    )


def test_a_run_that_fails_before_its_new_picture_is_drawn_keeps_no_picture_of_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, "trainer.max_steps=2")
    monkeypatch.delattr("invformer.training.fit.read_curves")
    with pytest.raises(NameError):
        train(tmp_path, "trainer.max_steps=4")
    assert validated(tmp_path) == [1, 3]
    assert not (tmp_path / "a" / "summary.png").exists()


def test_a_run_that_is_made_longer_follows_the_longer_schedule_from_its_first_new_step(
    tmp_path: Path,
) -> None:
    for optim in ("adamw", "muon"):
        more = (f"optim={optim}", "monitor.enabled=false")
        train(tmp_path, *more, f"run.name={optim}-once", "trainer.max_steps=4")
        train(tmp_path, *more, f"run.name={optim}", "trainer.max_steps=2")
        train(tmp_path, *more, f"run.name={optim}", "trainer.max_steps=4")
        rates, wanted = (column(tmp_path, "optim/lr", n) for n in (optim, f"{optim}-once"))
        assert rates[2:] == wanted[2:]
        assert rates[2] > 0


def test_a_signal_after_the_last_step_leaves_a_validation_to_be_made_up(tmp_path: Path) -> None:
    train(tmp_path, "trainer.val_every=4", "run.name=once")
    with pytest.raises(Interrupted):
        train(tmp_path, "trainer.val_every=4", stop_at=5)
    assert newest(tmp_path).step == 6
    train(tmp_path, "trainer.val_every=4")
    assert validated(tmp_path) == [3, 5]
    assert_same(tmp_path, STATE)


def test_a_checkpoint_without_the_weights_that_learn_does_not_continue_an_average(
    tmp_path: Path,
) -> None:
    train(tmp_path, "optim.ema_decay=0.9", until=4)
    edit_json(newest(tmp_path).path, STATE, lambda s: s.pop(LEARNING))
    with pytest.raises(CheckpointError, match="learning_weights"):
        train(tmp_path, "optim.ema_decay=0.9")


def test_a_damaged_newest_checkpoint_costs_one_interval_and_no_bit(
    whole: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = newest(folder).path / "weights.safetensors"
    damaged.write_bytes(flipped(damaged.read_bytes()))
    with caplog.at_level(logging.WARNING):
        train(folder)
    (warning,) = [r.message for r in caplog.records if "continuing from" in r.message]
    assert "step-00000004" in warning
    assert "continuing from step-00000002" in warning
    assert contents(newest(folder)) == contents(newest(whole))
    assert losses(folder) == losses(whole)


def test_a_run_that_goes_on_ends_at_the_same_bits_with_the_last_two_checkpoints_and_the_best(
    whole: Path, folder: Path
) -> None:
    assert newest(folder).step == 4
    partial = folder / "a" / "checkpoints" / ".partial-step-00000005"
    partial.mkdir()
    (partial / MODEL).write_text("{")
    train(folder)
    saved = {path.name for path in (folder / "a" / "checkpoints").iterdir()}
    best = newest(folder).metadata["best"]
    assert saved == {"step-00000004", "step-00000006", best}
    assert read_checkpoint(str(folder / "a")).path.name == best
    assert contents(newest(folder)) == contents(newest(whole))
    assert losses(folder) == losses(whole)


def test_the_best_checkpoint_is_the_one_of_the_lowest_bpc(tmp_path: Path) -> None:
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


def test_a_checkpoint_says_what_it_is(whole: Path) -> None:
    metadata = newest(whole).metadata
    assert metadata["step"] == 6
    assert metadata["vocabulary"]["characters"] == "".join(sorted(set(TEXT)))
    assert {"torch", "lightning"} <= metadata["versions"].keys()
    assert metadata["certificate"]["norm"] == "token_max"
    assert len(metadata["data_sha256"]) == 64


@pytest.mark.parametrize("change", [lambda t: t.replace("7", "8"), lambda t: t + " "])
def test_a_changed_text_is_refused_with_code_3(folder: Path, change: Callable[[str], str]) -> None:
    (folder / "squares.txt").write_text(change(TEXT))
    with pytest.raises(DataError, match="the text changed since the run began") as error:
        train(folder)
    assert error.value.exit_code == 3
    assert newest(folder).step == 4


def test_fewer_steps_than_a_run_has_taken_are_refused_and_change_nothing(folder: Path) -> None:
    run = folder / "a"
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=r"is at step 4, past trainer\.max_steps=3: ask for"):
        train(folder, "trainer.max_steps=3")
    assert (run / "config.yaml").read_bytes() == before
    train(folder, "trainer.max_steps=7")
    assert OmegaConf.load(run / "config.yaml").trainer.max_steps == 7


def test_the_same_text_at_another_path_continues_the_run(whole: Path, folder: Path) -> None:
    moved = (folder / "squares.txt").rename(folder / "moved.txt")
    train(folder, f"data.path={moved}")
    assert losses(folder) == losses(whole)


class Rename(L.Callback):
    """Renames the folder of a run after a batch."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.folder, self.batch = folder, batch

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            self.folder.rename(self.folder.with_name("renamed"))


@pytest.mark.parametrize(("batch", "more"), [(2, ()), (3, ("monitor.flush_every=9",)), (5, ())])
def test_a_run_whose_folder_is_renamed_ends_and_makes_nothing_at_the_old_place(
    whole: Path, tmp_path: Path, batch: int, more: tuple[str, ...]
) -> None:
    write_text(tmp_path)
    words = small_runs.options(tmp_path, "a", *SHORT, *more)
    with pytest.raises(CheckpointError, match=r"/a was renamed or deleted while this run was on"):
        fit(built(words, Rename(tmp_path / "a", batch)))
    assert not (tmp_path / "a").exists()
    assert losses(tmp_path, "renamed") == losses(whole)[: batch // 2 * 2]


# --- Settings that may differ ---------------------------------------------------------------------

FREE = (
    "trainer.eval_batch_size=3", "data.split=train", "data.unknown=refuse", "monitor.every=2",
    "monitor.length=5", "monitor.num_sequences=2", "monitor.inversion=true",
    "monitor.flush_every=1", "trainer.sample_length=5",
)  # fmt: skip


@pytest.mark.parametrize("more", [FREE, ("monitor.enabled=false",)])
def test_settings_that_change_no_trained_number_may_change(
    whole: Path, folder: Path, more: tuple[str, ...], caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize(
    "word",
    [
        "trainer.val_every=3",
        "trainer.checkpoint_activations=true",
        "trainer.num_threads=1",
        "model.attention_kernel=math",
    ],
)
def test_settings_that_move_the_rounding_may_change_with_one_line(
    whole: Path, folder: Path, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(folder, word)
    (line,) = [r.message for r in caplog.records]
    assert f"{word.partition('=')[0]} was " in line
    assert line.endswith("; it continues, not bit for bit")
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)


CHANGED = (
    "data.batch_size=4",
    "optim.lr=1e-4",
    "optim.muon_lr=1e-3",
    "optim.weight_decay=0.3",
    "optim.grad_clip=0.1",
    "optim.betas=[0.8,0.9]",
    "model.head_dropout=0.1",
    "optim.warmup_steps=0",
)


def test_on_request_a_run_goes_on_with_other_rates_batches_decay_clipping_and_dropout(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
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


def test_half_the_batch_twice_a_step_is_the_same_training(whole: Path, folder: Path) -> None:
    words = ("data.batch_size=4", "trainer.accumulate=2")
    train(folder, *words, "run.change=true", until=5)
    train(folder, *words)
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    train(folder, "trainer.max_steps=7", "run.change=true")
    assert validated(folder) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("run.seed=1", r"or start a new run from its weights: run\.name=NEW init_from=/"),
        ("optim=adamw", r"or start a new run from its weights: run\.name=NEW init_from=/"),
        ("optim.ema_decay=0.9", r"or start a new run from its weights: run\.name=NEW init_from=/"),
        ("model.d_model=32", r"or choose another run\.name \(init_from= would bring"),
    ],
)
def test_what_cannot_change_is_refused_with_a_way_that_works(
    folder: Path, word: str, way: str
) -> None:
    with pytest.raises(CheckpointError, match=way):
        train(folder, word, "run.change=true")


# --- States that are none of this run ------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict, dict], Any]) -> None:
    """Change metadata and state of the newest checkpoint, and write it properly."""
    saved = newest(folder)
    metadata, state = dict(saved.metadata), saved.read_state()
    weights = safetensors.torch.load_file(saved.path / WEIGHTS)
    shutil.rmtree(saved.path)
    change(metadata, state)
    write_checkpoint(saved.path, metadata, weights, state)


def optimiser(state: dict) -> dict:
    return state["optimizer_states"][0]


def group(state: dict) -> dict:
    return optimiser(state)["param_groups"][-1]


def memory(state: dict) -> dict:
    return optimiser(state)["state"][group(state)["params"][0]]


def schedule(state: dict) -> dict:
    return state["lr_schedulers"][0]


def progress(state: dict) -> dict:
    return state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]


CHANGES: dict[str, Callable[[dict, dict], Any]] = {
    "moments of another shape": lambda m, s: memory(s).update(exp_avg=torch.ones(1)),
    "moments that are missing": lambda m, s: memory(s).pop("exp_avg_sq"),
    "another weight decay": lambda m, s: group(s).update(weight_decay=9.0),
    "no optimiser": lambda m, s: s.update(optimizer_states=[]),
    "a schedule of ten times the rate": lambda m, s: schedule(s).update(base_lrs=[1.0, 1.0]),
    "a schedule that begins anew": lambda m, s: schedule(s).update(last_epoch=0),
    "no random state": lambda m, s: s["callbacks"].pop("RandomState"),
    "a random state too short": lambda m, s: s["callbacks"]["RandomState"].update(
        cpu=torch.zeros(3, dtype=torch.uint8)
    ),
    "a callback more": lambda m, s: s["callbacks"].update(ModelCheckpoint={"dirpath": "/"}),
    "no loops": lambda m, s: s.update(loops={}),
    "loops of another step": lambda m, s: m.update(step=3),
    "a counter that is true": lambda m, s: progress(s).update(started=True),
    "a counter of batches too few": lambda m, s: progress(s).update(completed=3),
    "a position of another step": lambda m, s: s["data"].update(global_step=3),
    "another vocabulary": lambda m, s: m.update(vocabulary={"characters": "abc"}),
    "another configuration": lambda m, s: m["config"]["optim"].update(lr=1.0),
}


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in CHANGES.items()])
def test_a_state_of_another_run_is_refused_with_code_4(
    folder: Path, change: Callable[[dict, dict], Any]
) -> None:
    rewrite(folder, change)
    with pytest.raises(InvformerError) as error:
        train(folder)
    assert error.value.exit_code == 4, error.value
    assert "\n" not in str(error.value)
    assert (newest(folder).path / STATE).exists()
