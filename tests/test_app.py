"""The application as a user meets it: train, resume, monitor, evaluate, and every way to fail."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch

import invformer
from invformer.evaluation.result import Evaluation
from invformer.runs.checkpoint import WEIGHTS, read_checkpoint
from invformer.runs.encoding import pack
from invformer.runs.run_log import read_rows
from tests.support import small_runs
from tests.support.processes import ROOT, python
from tests.support.saved_runs import evaluated
from tests.support.small_runs import fitted, newest, write_text

# While Dynamo traces, it does what PyTorch warns of.
COMPILES = (pytest.mark.slow, pytest.mark.compiles, pytest.mark.filterwarnings("ignore"))
pytestmark = pytest.mark.usefixtures("single_precision", "without_plots")


def options(folder: Path, *more: str) -> list[str]:
    """Of a run of two blocks, eight steps and two validations."""
    write_text(folder)
    size = ("model.d_model=24", "model.num_layers=2", "model.num_heads=2", "data.batch_size=4")
    steps = ("trainer.max_steps=8", "trainer.val_every=4", "trainer.sample_length=20")
    return small_runs.options(folder, "a", *size, *steps, "monitor.flush_every=3", *more)


def train(arguments: list[str]) -> Path:
    return fitted(arguments).directory.path


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(newest(run).path / WEIGHTS)


def test_metrics_hold_one_complete_row_per_step_and_other_loggers_get_the_same(tmp_path) -> None:
    run = train(options(tmp_path, "logger.name=[csv,tensorboard]"))
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    for row in rows:
        assert {"train/nats", "train/bpc", "optim/muon_lr", "optim/grad_norm"} <= row.keys()
        assert row["lipschitz/estimate"] <= row["lipschitz/target"]
    assert "val/bpc" in rows[3]
    assert "val/bpc" in rows[7]
    assert rows[7]["inverse/characters_recovered"] == 1
    assert rows[7]["lipschitz/local_bound"] <= rows[7]["lipschitz/bound"]
    numbers: dict[int, dict[str, float]] = {}
    for row in csv.DictReader((run / "csv/version_0/metrics.csv").read_text().splitlines()):
        given = {key: float(value) for key, value in row.items() if value and key != "step"}
        numbers.setdefault(int(row["step"]), {}).update(given)
    assert numbers == {row.pop("step"): row for row in rows}
    assert list(run.glob("tensorboard/events.*"))


@pytest.mark.parametrize(
    "model",
    [
        ("model.head_dropout=0.1", "model.dropout=0.1"),
        ("model=dot_product", "model.dropout=0.1"),
        pytest.param(("model.head_dropout=0.1", "trainer.compile=true"), marks=COMPILES),
    ],
)
def test_the_monitor_changes_no_bit_of_the_training(tmp_path, model: tuple[str, ...]) -> None:
    """Dropout too: a monitor that drew a random number would change the masks."""
    size = ("model.d_model=24", "model.num_layers=2", "model.num_heads=2")
    given = options(tmp_path, *model, *size)
    with_monitor = final_weights(train([*given, "run.name=with"]))
    without = final_weights(train([*given, "run.name=without", "monitor.enabled=false"]))
    torch.testing.assert_close(with_monitor, without, rtol=0, atol=0)


BASELINES = {"dot_product", "l2", "reversible"}


@pytest.mark.parametrize("preset", [p.stem for p in (ROOT / "configs/model").glob("*.yaml")])
def test_every_model_trains_and_evaluates(tmp_path, preset: str) -> None:
    size = ["model.d_model=24", "model.num_layers=2", "model.num_heads=2"]
    run = train([*options(tmp_path), f"model={preset}", *size, "trainer.max_steps=2"])
    assert read_checkpoint(str(run)).evaluation == run / "evaluation.json"
    report = evaluated(run)
    assert report.num_characters > 0
    assert report.bpc == pytest.approx(report.nats / 0.6931471805599453)
    assert (report.certificate is None) == (preset in BASELINES)
    if report.certificate is not None:
        assert report.inversion
        assert report.certificate.bound_max <= 0.7
        assert report.inversion.characters_recovered == 1
        assert report.inversion.characters_proven == 1
    model, text = invformer.load(run, "cpu"), "3 times 3"
    found = model.invert(model.encode(text))
    assert found.text == text
    assert (found.num_steps > 0) == (preset not in BASELINES)
    assert (found.residual < 1e-3) == (preset not in {"dot_product", "l2"})  # NaN: none


def test_a_training_names_its_evaluation(tmp_path, command, capsys) -> None:
    assert command("train", *options(tmp_path, f"run.root={tmp_path / 'my runs'}")) == 0
    run = tmp_path / "my runs" / "a"
    (said,) = re.findall("python evaluate.py (.*)", capsys.readouterr().out)
    assert command("evaluate", *shlex.split(said)) == 0
    out = capsys.readouterr().out
    report = json.loads((run / "evaluation.json").read_text())
    assert Evaluation.from_json(report).to_json() == report
    assert {
        "config.yaml", "metrics.jsonl", "checkpoints", "certificate.json", "sample.txt",
        "summary.png",
    } <= {path.name for path in run.iterdir()}  # fmt: skip
    written = run / "evaluation" / "text_file-val-8.json"
    assert out.splitlines()[-1] == f"written to {written} and {run / 'report.html'}"
    assert json.loads(written.read_text()) == report


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("optim=muon", "optim.ema_decay=0.9")])
def test_two_processes_have_the_losses_of_one_at_the_same_global_batch(
    tmp_path, more: tuple[str, ...]
) -> None:
    runs = {}
    for name, devices in (("one", 1), ("two", 2)):
        arguments = options(
            tmp_path, f"run.name={name}", "data.batch_size=8",
            f"trainer.devices={devices}", "trainer.accelerator=cpu",
            "monitor.every=1", "monitor.length=8", *more,
        )  # fmt: skip
        done = python(str(ROOT / "train.py"), *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        runs[name] = read_rows(tmp_path / name / "metrics.jsonl")
    for key in ("train/nats", "optim/grad_norm", "val/bpc", "lipschitz/estimate"):
        one, two = ([row[key] for row in rows if key in row] for rows in runs.values())
        assert one
        assert two == pytest.approx(one, rel=1e-4)
    shapes = []
    for name in runs:  # of weights and the optimiser's memory; probes know no processes
        _, state = pack(newest(tmp_path / name).read_state())
        tensors = (final_weights(tmp_path / name) | state).items()
        shapes.append({name: tensor.shape for name, tensor in tensors if "cuda" not in name})
    assert shapes[0] == shapes[1]
