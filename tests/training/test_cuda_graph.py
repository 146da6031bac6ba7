"""A run whose steps are graphs is the same run: here a processor notes and repeats operations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, TensorDataset

from invformer.runs.run_log import read_rows
from invformer.training.fit import train
from invformer.training.module import CharLanguageModel
from invformer.training.monitor import LipschitzMonitor
from invformer.training.step_graphs import StepGraphs
from invformer.weights.spectral import set_manual_refresh
from tests.gpu.emulation import cuda_rules
from tests.gpu.graphs import noted_graphs
from tests.support.builders import contractive_model, random_tokens
from tests.support.small_runs import built, options, own_trainer

SIZES = ("data.seq_len=16", "data.batch_size=4", "model.d_model=24", "model.num_layers=2")
STEPS = ("trainer.max_steps=4", "trainer.val_every=2", "optim.ema_decay=0.9")
MODELS = {
    "contractive_l2": ("monitor.every=2",),
    "contractive_bounded": ("model.strictly_causal=true", "optim.name=muon"),
    "dot_product": ("model.dropout=0.2",),
}


def trained(folder: Path, name: str, *words: str) -> tuple[list[torch.Tensor], list[dict]]:
    """The weights that a run ends with, and its rows without what a clock says."""
    run = built(options(folder, name, *SIZES, *STEPS, *words))
    with cuda_rules():
        train(run)
    rows = read_rows(run.directory.metrics)
    kept = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
    return weights_of(run.module), kept


@pytest.fixture
def replaying(monkeypatch) -> None:
    """Modules and probes replay and estimates run early, as on a GPU."""
    one_pass = property(lambda self: self.module.trainer.accumulate_grad_batches == 1)
    monkeypatch.setattr(StepGraphs, "replays", one_pass)
    start = LipschitzMonitor.on_train_start

    def on_train_start(self: LipschitzMonitor, *args: Any) -> None:
        start(self, *args)
        self.watched.beside = Mock()

    monkeypatch.setattr(LipschitzMonitor, "on_train_start", on_train_start)


def module() -> CharLanguageModel:
    """A small model and a plain optimiser."""
    torch.manual_seed(0)
    model = contractive_model()
    set_manual_refresh(model)
    return CharLanguageModel(model, lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True))


def trainer(*callbacks: L.Callback, **more: Any) -> L.Trainer:
    """Four epochs of two steps."""
    return own_trainer(*callbacks, max_epochs=4, **more)


def text(batch_size: int = 4) -> DataLoader:
    """Eight windows."""
    torch.manual_seed(1)
    tokens = random_tokens(8)
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=batch_size)


def move(model: CharLanguageModel) -> CharLanguageModel:
    """Give a model other memory, as going to a device does; what it had becomes NaN."""
    for tensor in [*model.parameters(), *model.buffers()]:
        before, tensor.data = tensor.data, tensor.data.clone()
        before.fill_(torch.nan if before.is_floating_point() else 0)
    return model


class Fails(L.Callback):
    """Ends a loop after a backward pass."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("out of memory")


def weights_of(model: CharLanguageModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def after_a_failure() -> list[torch.Tensor]:
    """The weights after a loop that failed and another one."""
    model = module()
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(Fails()).fit(model, text(), text())
    trainer().fit(move(model), text(), text())
    return weights_of(model)


def with_more_batches_a_step() -> list[torch.Tensor]:
    """The weights after two epochs of single batches and two with pairs of them."""
    model = module()
    trainer(GradientAccumulationScheduler({0: 1, 2: 2})).fit(model, text(), text())
    return weights_of(model)


def validated_later() -> list[torch.Tensor]:
    """The estimates of a validation after a training."""
    model, monitor = module(), LipschitzMonitor(random_tokens(1)[:, :8])
    trainer(monitor).fit(model, text(), text())
    trainer(monitor).validate(move(model), text(), verbose=False)
    return [monitor.watched.probe.values(weights=None)]


def validated_twice() -> list[torch.Tensor]:
    """The losses of two validations in half precision, of four batches each."""
    model, found = module(), []
    for _ in range(2):
        here = trainer(precision="bf16-mixed")
        found += here.validate(move(model), text(2), verbose=False)
    return [torch.tensor([row["val/nats"] for row in found])]


WAYS = [after_a_failure, with_more_batches_a_step, validated_later, validated_twice]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_no_graph_is_replayed_that_does_not_fit(way: Any, request) -> None:
    with cuda_rules():
        expected = way()
    request.getfixturevalue("replaying")
    with noted_graphs(), cuda_rules():
        found = way()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("model", MODELS)
def test_a_replayed_step_changes_no_weight_and_no_row(model: str, folder, request) -> None:
    words = (f"model={model}", *MODELS[model])
    weights, rows = trained(folder, "launched", *words)
    request.getfixturevalue("replaying")
    with noted_graphs():
        replayed, same_rows = trained(folder, "replayed", *words)
    assert same_rows == rows
    assert all(torch.equal(a, b) for a, b in zip(weights, replayed, strict=True))


def test_a_step_is_replayed_where_its_gradients_are_of_one_pass_of_one_process() -> None:
    cuda = torch.device("cuda")
    step: Any = {"wanted": True, "device": cuda, "recompute": False, "passes": 1}

    def replays(**changed: Any) -> bool:
        now = SimpleNamespace(**step | changed, model=torch.nn.Module(), refresh=Mock())
        now.model.stack = SimpleNamespace(checkpoint_activations=now.recompute)
        now.trainer = SimpleNamespace(accumulate_grad_batches=now.passes)
        return StepGraphs(now, now.wanted).replays

    assert replays()
    others = {"wanted": False, "device": torch.device("cpu"), "recompute": True, "passes": 2}
    assert not [key for key, value in others.items() if replays(**{key: value})]
