"""Weights & Biases: offline by itself, the right step axis, plain configuration, exit codes."""

from pathlib import Path

import pytest

from invformer.training import wandb_sink
from invformer.training.wandb_sink import STEP, WandbSink
from tests.training.wandb_records import history_and_config

CONFIG = {"config": {"model": {"d_model": 24, "name": "l2"}}, "command": "python train.py"}


@pytest.fixture
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(wandb_sink, "has_api_key", lambda: False)


def open_sink(folder: Path) -> WandbSink:
    return WandbSink(folder, name="a", config=CONFIG, project="tests", mode="auto", tags=["x"])


@pytest.mark.usefixtures("_no_key")
def test_without_a_key_the_run_is_offline_and_says_how_to_upload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = open_sink(tmp_path)
    sink.finish(0)
    assert sink.run.offline
    assert "wandb sync" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_key")
def test_rows_arrive_with_their_optimiser_step_even_out_of_order(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    for step in (0, 1, 5, 3):
        sink(step, {"train/bpc": 2.0 + step})
    sink.table("sample", ["text"], [["hello"]])
    sink.finish(7)
    rows, config, exit_code = history_and_config(tmp_path)
    logged = [(row[STEP], row["train/bpc"]) for row in rows if "train/bpc" in row]
    assert logged == [(0, 2.0), (1, 3.0), (5, 7.0), (3, 5.0)]
    assert any(key.startswith("sample") for row in rows for key in row)
    assert config["config"]["model"] == {"d_model": 24, "name": "l2"}
    assert exit_code == 7


@pytest.mark.usefixtures("_no_key")
def test_a_client_that_fails_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = open_sink(tmp_path)
    sink.finish(0)
    sink(0, {"train/bpc": 1.0})
    assert "row of step 0 not logged" in capsys.readouterr().err


def test_a_key_in_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_sink.has_api_key()
