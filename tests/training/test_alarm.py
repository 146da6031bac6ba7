"""The alarm: when it sounds, what it says, and that a run it stopped loses nothing."""

from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch import loggers

from invformer.errors import Alarmed
from invformer.runs.wandb_logger import WandbLogger
from invformer.training import alarm
from invformer.training.alarm import Alarm, blocks_of, growth
from invformer.training.fit import fit
from invformer.training.monitor import LipschitzMonitor
from tests.support import small_runs

BASELINE = ("model=dot_product", "model.d_model=16", "model.num_layers=1", "model.num_heads=2")


def words(folder: Path, name: str, mode: str, *more: str) -> list[str]:
    return small_runs.options(folder, name, *BASELINE, f"monitor.alarm={mode}", *more, model=())


def alarm_of(run: object) -> Alarm:
    return run.callback(Alarm)  # type: ignore[attr-defined]


@pytest.fixture
def _nervous(monkeypatch) -> None:
    """It sounds for any branch that has grown by a thousandth."""
    monkeypatch.setattr(alarm, "GROWTH", 1.001)


def test_the_branch_that_grew_most_is_named_and_a_start_at_zero_is_no_alarm() -> None:
    start = {"a": 1.0, "b": 0.5, "zero": 0.0}
    assert growth({"a": 3.0, "b": 2.0, "zero": 0.02}, start) == (4.0, "b")
    assert growth({"a": 3.0, "zero": 0.05}, start) == (5.0, "zero")  # over 0.01
    assert growth({"a": float("nan"), "b": 9.0}, start) == (float("inf"), "a")


def test_blocks_are_the_members_of_the_outermost_lists() -> None:
    first, out = (
        torch.nn.ModuleDict({"heads": torch.nn.ModuleList([torch.nn.Tanh()])}) for _ in range(2)
    )
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([first, torch.nn.Tanh()]), "out": out})
    assert blocks_of(model) == {"h.0", "h.1", "out.heads.0"}


@pytest.mark.usefixtures("_nervous")
def test_it_warns_once_and_changes_no_number(folder, capfd) -> None:
    quiet, warned = (small_runs.fitted(words(folder, mode, mode)) for mode in ("off", "warn"))
    lines = [line for line in capfd.readouterr().err.splitlines() if "times its start" in line]
    assert lines == [alarm_of(warned).sounded]
    assert lines[0].startswith("step ")
    assert "local constant of block_00/" in lines[0]
    assert small_runs.difference(folder / "off", folder / "warn") is None
    assert not alarm_of(quiet).sounded


@pytest.mark.usefixtures("_nervous")
def test_a_run_that_it_stopped_is_saved_and_continues_with_warn_to_the_same_bits(folder) -> None:
    with pytest.raises(Alarmed, match=r"monitor.alarm=warn") as stopped:
        small_runs.fitted(words(folder, "a", "stop"))
    assert stopped.value.exit_code == 10
    assert small_runs.newest(folder / "a").step == 4  # the first flush
    with pytest.raises(Alarmed, match="has stopped this run"):
        small_runs.fitted(words(folder, "a", "stop"))
    continued = small_runs.fitted(words(folder, "a", "warn"))
    assert continued.trainer.global_step == small_runs.STEPS
    small_runs.fitted(words(folder, "b", "off"))
    states = small_runs.final_state(folder / "a"), small_runs.final_state(folder / "b")
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_run_that_continues_compares_with_its_first_start(folder) -> None:
    first = small_runs.fitted(words(folder, "a", "warn", "trainer.max_steps=5"))
    again = small_runs.built(words(folder, "a", "warn"))
    fit(again)
    assert alarm_of(again).start == alarm_of(first).start != {}


def test_our_wandb_logger_and_lightnings_are_alerted_once() -> None:
    ours, lightnings = Mock(spec=WandbLogger), Mock(spec=loggers.WandbLogger)
    one = Alarm("warn")
    one.trainer, one.blocks = Mock(loggers=[ours, lightnings]), set()
    for step, value in enumerate((1.0, 200.0, 1000.0, 9000.0)):
        one.hear(step, {"lipschitz_branches/block_00/attention/estimate": value})
    line = one.sounded
    assert line.startswith("step 2: local constant of block_00/attention 1,000, 1,000 times its")
    ours.alert.assert_called_once_with(alarm.TITLE, line)
    lightnings.experiment.alert.assert_called_once_with(alarm.TITLE, line)


class Foreign(L.LightningModule):
    """Somebody else's model, whose blocks learn to be large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return -self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1.0)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.usefixtures("_nervous")
@pytest.mark.parametrize(("mode", "steps"), [("off", 120), ("warn", 120), ("stop", 25)])
def test_it_watches_the_blocks_of_a_foreign_model_and_stops_its_trainer(
    mode: alarm.AlarmMode, steps: int, capfd
) -> None:
    data = torch.utils.data.DataLoader(torch.ones(120, 3), batch_size=1)
    monitor = LipschitzMonitor(torch.ones(1, 3), every=10, alarm=mode)
    trainer = small_runs.own_trainer(monitor, max_epochs=1)
    trainer.fit(Foreign(), data)
    assert trainer.global_step == steps
    assert ("local constant of blocks." in capfd.readouterr().err) == (mode != "off")
