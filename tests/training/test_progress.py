"""The lines that a run prints, and runs that start with the weights of another."""

import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from invformer.errors import Interrupted
from invformer.evaluation.bits_per_character import BitsPerCharacter
from invformer.processes import exit as ending
from invformer.runs.run_log import read_rows
from invformer.training.fit import Run, fit
from tests.support.saved_runs import evaluated
from tests.support.small_runs import TEXT, StopAt, built, fitted, losses, newest, options

SHORT = ("trainer.max_steps=20", "trainer.val_every=10", "monitor.flush_every=1")
CONTRACTIVE = "  bounds ≤ 0\\.\\d{4} proven  recovered 100 %"


def run_of(folder: Path, *more: str) -> Run:
    return built(options(folder, "a", *SHORT, *more))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_a_terminal_a_run_is_a_few_lines(folder, capsys, accumulate: int) -> None:
    fit(run_of(folder, f"trainer.accumulate={accumulate}", "trainer.progress=true"))
    said = capsys.readouterr().out
    assert "\r" not in said
    steps = [line for line in said.splitlines() if line.startswith("step")]
    assert [int(line.split()[1].split("/")[0]) for line in steps] == [4, 8, 10, 12, 16, 20]
    losses = r"train \d\.\d{3}  val \d\.\d{3}"
    assert re.fullmatch(r"step  4/20  train \d\.\d{3}  \S+ steps/s  \d\d:\d\d left", steps[0])
    validated = rf"step 10/20  {losses}{CONTRACTIVE}  \S+ steps/s  \d\d:\d\d left"
    assert re.fullmatch(validated, steps[2])
    assert re.fullmatch(rf"step 20/20  {losses}{CONTRACTIVE}  \S+ steps/s", steps[-1])
    checkpoint, words = f"checkpoint={folder / 'a'}", shlex.quote(TEXT[:30].strip())
    assert said.splitlines()[-5:-1] == [
        "inversion  100 % of the characters recovered",
        f"folder     {folder / 'a'}",
        f"sample     python sample.py {checkpoint} prompt={words}",
        f"invert     python invert.py {checkpoint} text={words}",
    ]


def test_a_finished_run_says_so_and_starts_nothing(folder, capsys, monkeypatch) -> None:
    fit(run_of(folder))
    result = capsys.readouterr().out.rpartition("steps/s\n")[2]
    run = run_of(folder, "logger.name=wandb", "logger.mode=offline")
    assert run.wandb is None
    monkeypatch.setattr(run.trainer, "fit", None)
    fit(run)
    first = f"{folder / 'a'} is finished: nothing is left to train\n"
    assert capsys.readouterr().out == first + result


def test_an_interruption_names_the_next_command(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ending, "stopping", threading.Lock())
    run = built(options(folder, "a", *SHORT), StopAt(5, signal.SIGINT))
    with pytest.raises(Interrupted, match="interrupted at step 6 by SIGINT, saved") as stopped:
        fit(run)
    assert ending.stopping.locked()  # so that a second signal adds no line
    again = shlex.split(str(stopped.value).partition("continue with: ")[2])
    assert again[:2] == ["python", "train.py"]
    capsys.readouterr()
    fitted(again[2:])
    said = capsys.readouterr().out
    assert re.search(r"continuing from step 6\nstep  8/20  train \S+  \S+ steps/s", said)


def test_a_run_whose_time_is_over_continues_to_the_same_weights(folder, capsys) -> None:
    more = ("trainer.max_steps=3", "trainer.max_time=00:00:00", "trainer.accumulate=2")
    for step in (1, 2, 3):
        fit(run_of(folder, *more))
        said = capsys.readouterr().out
        assert f"step {step}/3  train" in said
        assert (f"({3 - step} steps are left)" in said) == (step < 3)
    fit(run_of(folder, *more, "trainer.max_time=00:02:00", "run.name=whole"))
    first, *others = [
        [(row["train/nats"], row["optim/lr"]) for row in read_rows(folder / name / "metrics.jsonl")]
        for name in ("whole", "a")
    ]
    assert others == [first]


RISING = [3.0, 2.0, 2.5, 2.5, 1.9, 2.0, 2.1]


def test_a_run_without_a_better_validation_says_so_and_ends_where_its_patience_does(
    folder, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(BitsPerCharacter, "compute", lambda self: torch.tensor(next(values)))
    more = ("trainer.max_steps=14", "trainer.val_every=2", "optim.warmup_steps=1")
    values = iter(RISING)
    fit(run_of(folder, *more, "run.name=whole"))
    said = capsys.readouterr().out
    assert re.findall(r"the best validation was (\S+) at step (\d+)", said) == [
        ("2.000", "4"),
        ("1.900", "10"),
    ]
    values = iter(RISING)
    for patience, steps in ((1, 6), (1, 6), (2, 8), (2, 8), (3, 14)):
        run = run_of(folder, *more, f"trainer.patience={patience}")
        fit(run)
        said = capsys.readouterr().out
        assert newest(folder / "a").step == steps
        assert ("a larger trainer.patience continues it" in said) == (steps < 14)
    assert losses(folder / "a") == losses(folder / "whole")


def test_a_terminal_has_a_bar_that_continues_too(folder, capsys, monkeypatch) -> None:
    fit(run_of(folder))
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(run_of(folder, "trainer.progress=true", "trainer.max_steps=30"))
    said = capsys.readouterr()
    assert "| step 20/30 " in said.err
    assert re.search(r"\| step \d+/30  train \S+  val ", said.err)
    assert [line[:10] for line in said.out.splitlines() if line.startswith("step")] == [
        "step 30/30"
    ]


OTHER = "".join(f"{i} times {i + 1} is {i * i + i}; " for i in range(56))


@pytest.fixture
def trained(folder) -> Path:
    """A trained run "a", and another text in its characters."""
    fitted(options(folder, "a", "model.d_ff=24", "model=contractive_bounded"))
    (folder / "other.txt").write_text(OTHER)
    return folder


def tuned(folder: Path, *more: str) -> Run:
    words = options(folder, "b", f"data.path={folder / 'other.txt'}", "trainer.max_steps=4")
    own = [word for word in words if not word.startswith(("model.", "data.seq_len="))]
    return built([*own, f"init_from={folder / 'a'}", *more])


def test_a_run_starts_with_the_model_of_another_and_continues(trained) -> None:
    run = tuned(trained, "optim.lr=1e-9")
    assert run.config.model.name == "contractive_bounded"
    assert run.config.model.d_ff == 24
    fit(run)
    nats = [row["train/nats"] for row in read_rows(trained / "b" / "metrics.jsonl")]
    learnt = [row["train/nats"] for row in read_rows(trained / "a" / "metrics.jsonl")]
    assert max(nats) < min(learnt[:5])
    again = tuned(trained, "optim.lr=1e-9", "trainer.max_steps=6")
    assert again.resume is not None
    fit(again)
    report = evaluated(trained / "b", "evaluate.lipschitz_sequences=0")
    assert report.data.same_as_training
