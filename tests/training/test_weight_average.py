"""The average of the weights is the formula's, and it is what a run validates and leaves behind."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from invformer.nn import certify
from invformer.runs.checkpoint import LEARNING, PREFIX
from invformer.runs.run_log import read_rows
from invformer.training.weight_average import WeightAverage
from tests.support.small_runs import newest, own_trainer
from tests.training.test_loop import fitted


def test_it_is_the_mean_of_all_weights_with_powers_of_the_decay() -> None:
    model = nn.Linear(3, 2, bias=False)
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


@pytest.mark.usefixtures("single_precision", "without_plots")
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


class Trained(L.Callback):
    """Keeps the weights that another trainer starts from."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: object) -> None:
        self.start = pl_module.model.head.weight.detach().clone()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*many workers")
@pytest.mark.usefixtures("single_precision", "without_plots")
def test_another_trainer_validates_the_average_and_trains_what_learns(tmp_path) -> None:
    run = fitted(tmp_path, "ema", "optim.ema_decay=0.9", "trainer.precision=32-true")
    module, watch = run.module, Trained()
    learning = module.average.kept["head.weight"].clone()
    found = own_trainer().validate(module, run.data, verbose=False)[0]["val/bpc"]
    assert found == pytest.approx(read_rows(run.directory.metrics)[-1]["val/bpc"], rel=1e-5)
    own_trainer(watch, max_steps=1).fit(module, run.data)
    assert watch.start.equal(learning)
