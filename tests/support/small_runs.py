"""Small real runs, and whether two of them are the same run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import safetensors.torch
import torch

from invformer.config.load import load_config
from invformer.runs.checkpoint import Checkpoint, newest_checkpoint
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.run_log import Row, read_rows
from invformer.training.build import Run, build_run
from invformer.training.fit import fit
from tests.support.host_syncs import waits

TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(40))  # 5 steps an epoch
STEPS, VAL_EVERY = 15, 5  # three epochs; a validation at the end as well
CONTRACTIVE = ("model.d_model=16", "model.num_layers=1", "model.num_heads=2")
DROPOUT = ("model=dot_product", "model.dropout=0.1", *CONTRACTIVE)


def write_text(folder: Path) -> Path:
    """The text that the runs learn."""
    path = folder / "squares.txt"
    path.write_text(TEXT)
    return path


def write_rows(path: Path, rows: dict[int, Row], first_step: int = 0) -> None:
    """A metrics file, or more of it."""
    logger = JsonLinesLogger(path, first_step)
    for step, row in rows.items():
        logger.log_metrics(row, step)
    logger.save()


def options(root: Path, name: str, *more: str, model: Sequence[str] = CONTRACTIVE) -> list[str]:
    """Arguments of train.py; the text lies in the folder that holds the runs."""
    return [
        *model, "data=text_file", f"data.path={root / 'squares.txt'}", "data.seq_len=16",
        "data.batch_size=8", "data.val_fraction=0.1", "data.test_fraction=0",
        f"trainer.max_steps={STEPS}", f"trainer.val_every={VAL_EVERY}",
        "trainer.eval_batch_size=2", "trainer.progress=false",
        "trainer.sample_length=0", "trainer.accelerator=cpu", "logger.name=none",
        "monitor.flush_every=4", "monitor.inversion_sequences=1",
        f"run.root={root}", f"run.name={name}", *more,
    ]  # fmt: skip


def own_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A trainer of one's own, without output; ``options`` replace what it would say."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    return L.Trainer(callbacks=list(callbacks), **{"accelerator": "cpu"} | quiet | options)


def built(words: Sequence[str], *callbacks: L.Callback) -> Run:
    """A run of train.py with these arguments; the callbacks come before its own."""
    run = build_run(load_config(words))
    run.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
    return run


def fitted(words: Sequence[str], *callbacks: L.Callback) -> Run:
    """The same, trained to its end."""
    run = built(words, *callbacks)
    fit(run)
    return run


def tiny_run(folder: Path) -> Path:
    """A run of two blocks and eight steps, in float32."""
    torch.set_default_dtype(torch.float32)
    write_text(folder)
    size = ("model.d_model=24", "model.num_layers=2", "monitor.enabled=false")
    fitted(options(folder, "a", *size, "trainer.max_steps=8", "trainer.val_every=4"))
    return folder / "a"


class StopAt(L.Callback):
    """Sends the process signals as a batch ends."""

    def __init__(self, batch: int, *signals: int) -> None:
        self.batch, self.signals = batch, signals

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for number in self.signals if batch_idx == self.batch else ():
            os.kill(os.getpid(), number)


class Waits(L.Callback):
    """Notes what waits for the device between a batch and what callbacks make of its step."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.steps: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.watch = waits(self.device)
        self.steps.append(self.watch.__enter__())

    def on_train_batch_end(self, *_: Any) -> None:
        self.watch.__exit__(None, None, None)


def without_plots() -> None:
    """Called in a run before it starts: pictures take longer than its training."""
    import invformer.processes.bar
    import invformer.training.fit

    invformer.processes.bar.SILENT = 1e6  # a slow machine says no more than a fast one
    invformer.training.fit.plot_run = lambda _, path, *rest: path.touch()


def losses(run: Path) -> list[tuple[int, dict[str, str]]]:
    """Every number of every row in hexadecimal, except clocks."""
    return [
        (row["step"], {k: value.hex() for k, value in row.items() if is_reproducible(k, value)})
        for row in read_rows(run / "metrics.jsonl")
    ]


def is_reproducible(key: str, value: object) -> bool:
    """Whether a metric is no reading of a clock."""
    return isinstance(value, float) and not key.startswith("perf/")


def newest(run: Path) -> Checkpoint:
    """The newest checkpoint in a run's folder, in which all are whole."""
    found, refused = newest_checkpoint(run / "checkpoints")
    assert found is not None
    assert not refused
    return found


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimiser, random generators and monitor at the end of a run."""
    checkpoint = newest(run)
    assert checkpoint.step == STEPS
    files = sorted(checkpoint.path.glob("*.safetensors"))
    assert files
    return {
        f"{file.name}/{name}": tensor
        for file in files
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def difference(one: Path, other: Path) -> str | None:
    """The first thing in which two finished runs differ, in words; None if they are the same."""
    first, second = losses(one), losses(other)
    if [step for step, _ in first] != [step for step, _ in second]:
        return f"steps: {[s for s, _ in first]} and {[s for s, _ in second]}"
    for (step, row), (_, again) in zip(first, second, strict=True):
        if row != again:
            keys = sorted(k for k in row.keys() | again.keys() if row.get(k) != again.get(k))
            return f"step {step}: {keys}"
    state, again = final_state(one), final_state(other)
    if state.keys() != again.keys():
        return f"state: {sorted(state.keys() ^ again.keys())}"
    differing = [name for name in state if not torch.equal(state[name], again[name])]
    return f"state: {differing}" if differing else None
