"""A run whose steps are graphs is the same run: here a processor notes and repeats operations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from invformer.assemble.run import Run, build_run
from invformer.config import load_config
from invformer.lipschitz.probe import LipschitzProbe
from invformer.runs.run_log import read_rows
from invformer.training.fit import train
from invformer.training.module import CharLanguageModel
from tests.gpu.emulation import cuda_rules
from tests.gpu.graphs import noted_graphs
from tests.small_runs import options

SIZES = ("data.seq_len=16", "data.batch_size=4", "model.d_model=24", "model.num_layers=2")
STEPS = ("trainer.max_steps=6", "trainer.val_every=3", "optim.ema_decay=0.9")
MODELS = {
    "contractive_l2": (),
    "contractive_bounded": ("model.strictly_causal=true", "optim.name=muon"),
    "dot_product": ("model.dropout=0.2",),
}


def trained(folder: Path, name: str, *words: str) -> tuple[list[torch.Tensor], list[dict]]:
    """The weights that a run ends with, and its rows without what a clock says."""
    run: Run = build_run(load_config(options(folder, name, *SIZES, *STEPS, *words)))
    with cuda_rules():
        train(run)
    rows = read_rows(run.directory.metrics)
    kept = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
    return [p.detach() for p in run.module.model.parameters()], kept


@pytest.mark.parametrize("model", MODELS)
def test_a_replayed_step_changes_weights_and_rows_in_nothing(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"model={model}", *MODELS[model])
    weights, rows = trained(folder, "launched", *words)
    monkeypatch.setattr(CharLanguageModel, "replays", True)
    build = LipschitzProbe.__init__

    def build_probe(self: LipschitzProbe, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs | {"replays": True})

    monkeypatch.setattr(LipschitzProbe, "__init__", build_probe)
    with noted_graphs():
        replayed, same_rows = trained(folder, "replayed", *words)
    assert same_rows == rows
    assert all(torch.equal(a, b) for a, b in zip(weights, replayed, strict=True))
