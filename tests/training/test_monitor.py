"""The monitor records an estimate at every step, touches nothing, and repeats to the bit."""

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from invformer import load
from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.nn.proof import certify
from invformer.runs.run_log import read_rows
from invformer.training.fit import Run, fit
from invformer.training.monitor import LipschitzMonitor
from invformer.training.rows import Rows
from tests.support.small_runs import built, options, own_trainer


def run_with(folder: Path, *more: str) -> Run:
    size = ("data.seq_len=32", "data.batch_size=4", "model.d_model=24", "model.num_layers=2")
    steps = ("trainer.max_steps=12", "trainer.val_every=6", "monitor.inversion=false")
    return built(options(folder, "a", *size, *steps, *more))


def rows_of(run: Run) -> list[dict]:
    """The rows of a run without what a clock says."""
    rows = read_rows(run.directory.path / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


MODELS = [
    (),
    ("model.certificate=causal", "model.feed_forward_kernel=2"),
    ("model=contractive_bounded",),
    ("model=contractive_l2_paper",),
    ("model=dot_product",),
]


@pytest.mark.parametrize("model", MODELS)
def test_every_step_has_an_estimate_of_every_branch_and_a_validation_local_bounds(
    folder, model: tuple[str, ...]
) -> None:
    size = ("model.d_model=24", "model.num_layers=2", "model.num_heads=2")
    run = run_with(folder, *model, *size)
    fit(run)
    invertible = run.module.model.is_invertible
    rows = rows_of(run)
    assert len(rows) == 12
    for row in rows:
        largest = 0.0
        for block in ("block_00", "block_01"):
            for kind in ("attention", "feed_forward"):
                key = f"lipschitz_branches/{block}/{kind}"
                assert row[f"{key}/estimate"] > 0
                largest = max(largest, row[f"{key}/estimate"])
                if invertible and row["step"] in (5, 11):
                    kinds = ("estimate", "local_bound", "bound")
                    constants = [row[f"{key}/{kind}"] for kind in kinds]
                    assert sorted(constants) == constants
                    assert constants[-1] < row["lipschitz/target"]
                else:
                    assert not {f"{key}/local_bound", f"{key}/bound"} & row.keys()
        assert row["lipschitz/estimate"] == largest
        assert ("lipschitz/target" in row) == invertible
    validated = read_rows(run.directory.path / "metrics.jsonl")[5]
    assert validated["perf/monitor_overhead"] > 0


def test_a_second_monitor_of_our_model_has_a_share_of_time_of_its_own(folder) -> None:
    run = run_with(folder)
    first = run.callback(LipschitzMonitor)
    run.trainer.callbacks.append(LipschitzMonitor(first.inputs, name="second"))
    fit(run)
    validated = read_rows(run.directory.path / "metrics.jsonl")[5]
    assert validated["second/estimate"] > 0
    assert validated["perf/monitor_overhead"] > 0
    assert validated["perf/monitor_overhead/second"] > 0


def test_bounds_of_a_validation_are_those_of_the_weights_that_it_saves(folder) -> None:
    run = run_with(folder, "optim.ema_decay=0.9", "optim.lr=1e-2")
    fit(run)
    saved = certify(load(run.directory.path, "cpu").network).per_branch
    last = rows_of(run)[-1]
    assert {name: last[f"lipschitz_branches/{name}/bound"] for name in saved} == saved


def test_a_validation_changes_no_later_estimate(folder) -> None:
    often, seldom = (run_with(folder, f"run.name={n}", f"trainer.val_every={n}") for n in (3, 12))
    for run in (often, seldom):
        fit(run)
    for row, other in zip(rows_of(often), rows_of(seldom), strict=True):
        if (row["step"] + 1) % 3:
            assert row == other


def test_fewer_estimates_are_made_where_that_is_asked_for(folder) -> None:
    run = run_with(folder, "monitor.every=4", "monitor.num_sequences=2", "monitor.length=16")
    fit(run)
    assert [row["step"] for row in rows_of(run) if "lipschitz/estimate" in row] == [0, 4, 5, 8, 11]
    (monitor,) = (c for c in run.trainer.callbacks if isinstance(c, LipschitzMonitor))
    assert monitor.inputs.shape == (2, 16)


class Foreign(L.LightningModule):
    """Somebody else's model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Dropout())
        self.spare = torch.nn.ModuleList([torch.nn.Linear(3, 8)])

    def forward(self, x: torch.Tensor, _: object = None) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
def test_submodules_of_a_foreign_model_are_logged_and_its_training_is_the_same(monkeypatch) -> None:
    weights, said = [], []
    monkeypatch.setattr("invformer.training.monitor.rank_zero_info", said.append)
    for inputs in (None, (torch.ones(2, 3), "more")):
        module, rows = Foreign(), Rows()
        logged: dict[int, dict] = {}
        rows.listeners.append(lambda step, row, logged=logged: logged.update({step: row}))
        monitor = LipschitzMonitor(inputs, every=2)
        trainer = own_trainer(*([] if inputs is None else [monitor]), rows, max_steps=4)
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2))
        weights.append(module.net[0].weight)
    assert torch.equal(*weights)
    assert logged.keys() == {0, 2}
    names = {"lipschitz/net", "lipschitz/net.0", "lipschitz/net.1", "lipschitz/net.2"}
    assert logged[2].keys() == {"lipschitz/whole", *names}
    assert monitor.skipped == dict.fromkeys(["spare", "spare.0"], "it is not called")
    (line,) = said
    assert line == "the Lipschitz monitor skips modules, see its `skipped`: it is not called (2)"


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
def test_two_monitors_of_one_trainer_log_and_save_under_their_names(tmp_path: Path) -> None:
    rows, logged = Rows(), {}
    rows.listeners.append(lambda step, row: logged.update(row))
    monitors = [
        LipschitzMonitor(torch.ones(2, 3)),
        LipschitzMonitor(torch.zeros(1, 3), name="zero"),
    ]
    trainer = own_trainer(*monitors, rows, max_steps=1)
    trainer.fit(Foreign(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2))
    assert {"lipschitz/net.0", "zero/net.0"} <= logged.keys()
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["callbacks"]
    assert {"LipschitzMonitor", "LipschitzMonitor/zero"} <= saved.keys()


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(("precision", "measured"), [("64-true", True), ("bf16-true", False)])
def test_inputs_have_the_precision_of_a_foreign_trainers_batches_and_skips_are_told_once(
    precision: str, measured: bool, monkeypatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("invformer.training.monitor.rank_zero_info", said.append)
    monitor = LipschitzMonitor(torch.ones(2, 3))
    data = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)
    own_trainer(monitor, max_steps=4, precision=precision).fit(Foreign(), data)
    assert ("net" not in monitor.skipped) == measured
    assert len(said) == 1
    assert monitor.inputs.dtype == torch.float32  # the next trainer may have another precision


class Chatty(Foreign):
    """Logs in its forward method, and evaluates the loss several times a step."""

    def forward(self, x: torch.Tensor, _: object = None) -> torch.Tensor:
        y = self.net(x)
        self.log("scale", y.abs().max())
        return y

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
def test_what_forward_logs_is_that_of_training_and_a_step_is_measured_once(monkeypatch) -> None:
    counts, scales, gains = [], [], SubmoduleProbe.gains
    monkeypatch.setattr(SubmoduleProbe, "gains", lambda self: counts.append(1) or gains(self))
    for monitor in ([], [LipschitzMonitor(100 * torch.ones(2, 3))]):
        trainer = own_trainer(*monitor, max_steps=2)
        data = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)
        trainer.fit(Chatty(), data)
        scales.append(trainer.callback_metrics["scale"])
    assert torch.equal(*scales)
    assert len(counts) == 2


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
def test_callbacks_of_lightning_may_watch_what_is_measured(tmp_path, folder: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="lipschitz/net", every_n_train_steps=1)
    stop = EarlyStopping("lipschitz/whole", patience=9, check_on_train_epoch_end=True)
    options = {"max_epochs": 2, "enable_checkpointing": True}
    trainer = own_trainer(LipschitzMonitor(torch.ones(2, 3)), best, stop, **options)
    trainer.fit(Foreign(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2))
    assert best.best_model_score == min(best.best_k_models.values())
    assert stop.best_score <= trainer.callback_metrics["lipschitz/whole"]
    fit(run := run_with(folder))
    bound = run.trainer.callback_metrics["lipschitz/bound"]
    assert bound == read_rows(run.directory.path / "metrics.jsonl")[-1]["lipschitz/bound"]
