"""Module, data module and callbacks in a Trainer of the user's own, without a run folder."""

import csv
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from invformer.assemble.run import build_data, build_module
from invformer.config import load_config
from invformer.training.callbacks import CertificateKeeper, InversionMonitor, Sample, Speed
from invformer.training.monitor import LipschitzMonitor
from tests.small_runs import options, write_text


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_all_of_it_logs_to_a_csv_file(tmp_path: Path) -> None:
    write_text(tmp_path)
    torch.set_default_dtype(torch.float32)
    config = load_config(options(tmp_path, "a"))
    data = build_data(config)
    probe, decode = data.probe("val", 1), data.vocabulary.decode
    callbacks: list[L.Callback] = [
        LipschitzMonitor(probe[:, :8]), CertificateKeeper(), InversionMonitor(probe, None, decode),
        Sample(probe[0, :4], 8, decode), Speed(),
        ModelCheckpoint(tmp_path / "best", monitor="val/bpc"),
    ]  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=5, callbacks=callbacks,
        logger=CSVLogger(tmp_path), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(build_module(config, data, {}, None), data)
    (path,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    estimates = [row["step"] for row in rows if row["lipschitz/estimate"]]
    assert estimates == [str(step) for step in range(5)]
    (validation,) = [row for row in rows if row["val/bpc"]]
    assert validation["step"] == "4"
    assert any(row["inverse/characters_recovered"] for row in rows if row["step"] == "4")
    assert list(tmp_path.glob("best/*.ckpt"))
