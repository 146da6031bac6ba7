"""The training loop: what changes no loss, waits for no device, and the average of weights."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn import functional as F
from torch.utils import deterministic

from invformer.nn import certify
from invformer.runs.checkpoint import LEARNING, PREFIX
from invformer.runs.run_log import read_rows
from invformer.training.fit import Run, fit
from invformer.training.module import CharLanguageModel
from invformer.training.weight_average import WeightAverage
from invformer.weights.spectral import normalised
from tests.support import small_runs
from tests.support.small_runs import Waits, built, losses, newest, options, own_trainer

TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(600))
pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    (folder / "squares.txt").write_text(TEXT)
    size = ("model.d_model=24", "model.num_layers=2", "model.num_heads=2")
    steps = ("trainer.max_steps=6", "trainer.val_every=6", "trainer.precision=64-true")
    return options(folder, name, *size, *steps, "monitor.enabled=false", *more)


def fitted(folder: Path, name: str, *more: str) -> Run:
    """A short run."""
    return small_runs.fitted(arguments(folder, name, *more))


@pytest.mark.parametrize("model", ["contractive_l2", "dot_product"])
def test_checkpointed_and_accumulated_runs_have_the_same_losses(tmp_path, model: str) -> None:
    runs = {
        "plain": (),
        "checkpointed": ("trainer.checkpoint_activations=true",),
        "accumulated": ("trainer.accumulate=4", "data.batch_size=2"),
    }
    plain, *others = (
        [
            {key: row[key] for key in ("train/nats", "train/bpc", "val/bpc") if key in row}
            for row in read_rows(fitted(tmp_path, name, f"model={model}", *more).directory.metrics)
        ]
        for name, more in runs.items()
    )
    for rows in others:
        for row, expected in zip(rows, plain, strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "seq_len"),  # weights of attention are kept, or with more tokens computed again
    [("contractive_l2", 40), ("contractive_l2", 150), ("contractive_bounded", 150),
     ("dot_product", 40)],
)  # fmt: skip
def test_nothing_reads_unwritten_memory(tmp_path, monkeypatch, model: str, seq_len: int) -> None:
    rows = []
    for fill in (True, False):
        monkeypatch.setattr(deterministic, "fill_uninitialized_memory", fill)
        words = ("trainer.precision=32-true", "monitor.enabled=true", "trainer.max_steps=2")
        run = fitted(tmp_path, f"fill-{fill}", f"model={model}", f"data.seq_len={seq_len}", *words)
        assert torch.are_deterministic_algorithms_enabled()
        weights = [p.detach().clone() for p in run.module.model.parameters()]
        rows.append((losses(run.directory.path), weights))
    (filled, weights), (unfilled, same) = rows
    assert filled == unfilled
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_a_run_in_double_precision_has_losses_in_double_precision(tmp_path) -> None:
    """Recomputed from the weights it starts with, which a learning rate of nothing leaves alone."""
    run = fitted(tmp_path, "double", "trainer.max_steps=1", "optim=adamw", "optim.lr=1e-300")
    (row,) = read_rows(run.directory.metrics)
    model = run.module.model.eval()
    inputs, targets = run.data.first_batch()
    expected = -model(inputs).log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert row["train/nats"] == pytest.approx(expected.item(), rel=1e-12)
    total, count = math.log(model.head.out_features), 1
    for inputs, targets, scored in run.data.val_dataloader():
        nats = -model(inputs).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        total, count = total + nats[scored].sum().item(), count + int(scored.sum())
    assert row["val/nats"] == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("fail", [False, True])
def test_an_own_loop_after_a_run_trains_a_model_still_constrained(tmp_path, fail: bool) -> None:
    manual: set[bool] = set()

    def watch(trainer: L.Trainer, module: Any, *_: object) -> None:
        manual.update(weight.manual_refresh for weight in normalised(module.model))
        if fail and trainer.global_step == 3:
            raise ArithmeticError("broken on purpose")

    run = built(arguments(tmp_path, "own"), LambdaCallback(on_train_batch_start=watch))
    with pytest.raises(ArithmeticError) if fail else nullcontext():
        fit(run)
    assert manual == {True}
    model = run.module.model.train()
    inputs, targets = run.data.first_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    weights = normalised(model)
    assert weights
    model(inputs)
    for weight in weights:
        assert torch.linalg.matrix_norm(weight(), 2).max() <= 1 + 1e-9


@pytest.mark.parametrize(
    ("model", "accumulate"),
    [("contractive_l2", 1), ("contractive_bounded", 1), ("dot_product", 1), ("contractive_l2", 2)],
)
def test_no_step_waits_for_a_device(tmp_path, model: str, accumulate: int, monkeypatch) -> None:
    # On the CPU, where there is nothing to wait for, every update is looked at before it is made.
    monkeypatch.setattr(CharLanguageModel, "refuse_lost_update", lambda self: None)
    more = (f"model={model}", f"trainer.accumulate={accumulate}", "monitor.flush_every=100")
    watch = Waits()
    small_runs.fitted(arguments(tmp_path, "syncs", *more), watch)
    assert watch.steps[:-1] == [[]] * (6 * accumulate - 1)  # the last step ends in a validation


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*many workers")
@pytest.mark.parametrize("how", [("norm", 1e-3), ("value", 1e-5)])
def test_a_trainers_own_clipping_replaces_the_modules(tmp_path, how: tuple[str, float]) -> None:
    run, (algorithm, largest) = built(arguments(tmp_path, "clipped")), how
    run.module.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=1.0)
    run.module.make_schedule = None
    before = {name: p.detach().clone() for name, p in run.module.model.named_parameters()}
    own_trainer(
        max_steps=1, precision="64-true", limit_val_batches=0, gradient_clip_val=largest,
        gradient_clip_algorithm=algorithm,
    ).fit(run.module, run.data)  # fmt: skip
    after = run.module.model.named_parameters()
    moves = torch.cat([(p.detach() - before[name]).flatten() for name, p in after])
    size = moves.norm() if algorithm == "norm" else moves.abs().max()
    assert size == pytest.approx(largest, rel=1e-2)


def test_it_is_the_mean_of_all_weights_with_powers_of_the_decay() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    expected = model.weight.detach().clone()
    average = WeightAverage(model, decay=0.4)
    for step in range(30):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update(step)
        decay = min(0.4, (step + 1) / (step + 10))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    assert torch.allclose(average.kept["weight"], expected, rtol=1e-12)
    learning = model.weight.detach().clone()
    average.use(True)
    assert model.weight.allclose(expected)
    average.use(False)
    assert model.weight.equal(learning)


@pytest.mark.parametrize("model", ["contractive_l2", "dot_product"])
def test_a_run_validates_certifies_and_saves_the_average(tmp_path, model: str) -> None:
    options = [f"model={model}", "optim.ema_decay=0.9", "trainer.val_every=3"]
    run = fitted(tmp_path, "ema", *options)
    saved = newest(run.directory.path)
    weights = saved.read_weights(run.module.state_dict())
    left = run.module.model.state_dict()
    assert all(w.equal(weights[PREFIX + name]) for name, w in left.items())
    learning = saved.read_state()[LEARNING]
    assert any(not w.equal(left[name]) for name, w in learning.items())
    plain = fitted(tmp_path, "plain", options[0])
    ours, theirs = (read_rows(r.directory.metrics) for r in (run, plain))
    assert [r["train/nats"] for r in ours] == [r["train/nats"] for r in theirs]
    assert ours[-1]["val/bpc"] != theirs[-1]["val/bpc"]
    if model == "contractive_l2":
        certificate = certify(run.module.model)
        bounds = pytest.approx(certificate.per_branch, rel=1e-6)
        assert saved.metadata["certificate"]["per_branch"] == bounds
        assert certificate.holds


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*many workers")
def test_another_trainer_validates_the_average_and_trains_what_learns(tmp_path) -> None:
    run = fitted(tmp_path, "ema", "optim.ema_decay=0.9", "trainer.precision=32-true")
    module, start = run.module, []
    learning = module.average.kept["head.weight"].clone()
    found = own_trainer().validate(module, run.data, verbose=False)[0]["val/bpc"]
    assert found == pytest.approx(read_rows(run.directory.metrics)[-1]["val/bpc"], rel=1e-5)

    def keep(trainer: L.Trainer, module: Any, *_: object) -> None:
        start.append(module.model.head.weight.detach().clone())

    own_trainer(LambdaCallback(on_train_batch_start=keep), max_steps=1).fit(module, run.data)
    assert start[0].equal(learning)
