"""Run the training loop, then show what came of it."""

import shlex
import sys
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from invformer.config.load import typed
from invformer.config.schema import TrainConfig
from invformer.data.datamodule import TextDataModule
from invformer.data.tokens import unknown_rate
from invformer.errors import Alarmed, CheckpointError, one_line
from invformer.evaluation.ngram import ngram_baseline
from invformer.evaluation.result import from_plain
from invformer.kernels import native
from invformer.nn.certificate import Certificate
from invformer.processes import exit as ending
from invformer.processes.console import CONTROL_CHARACTER, printable
from invformer.processes.exit import explained
from invformer.processes.ranks import handlers_restored
from invformer.report.plots import plot_run, read_curves
from invformer.report.table import largest_proven, title_of
from invformer.runs.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from invformer.runs.files import replace_file
from invformer.runs.run_directory import RunDirectory
from invformer.runs.run_log import read_rows
from invformer.runs.saving import Checkpoints
from invformer.runs.wandb_logger import WandbLogger
from invformer.training.alarm import Alarm
from invformer.training.callbacks import CertificateKeeper, InversionMonitor, Sample
from invformer.training.module import CharLanguageModel
from invformer.training.progress import percent
from invformer.weights.spectral import set_manual_refresh

ALERTS = {5: "not finite", 6: "certificate violated", 9: "rank lost"}  # by exit code
MANY = 20  # passes over a text
SAVED = "; what was saved stays, start the same command again"
NGRAM_AT_ONCE = 1_000_000  # characters; evaluate.py counts longer texts
# While a state is restored they mean that it is none of this run.
REFUSALS = (CheckpointError, LookupError, AttributeError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Run:
    """Everything one training run consists of."""

    config: TrainConfig
    directory: RunDirectory
    module: CharLanguageModel
    data: TextDataModule
    trainer: L.Trainer
    resume: Checkpoint | None
    is_finished: bool = False

    @property
    def wandb(self) -> WandbLogger | None:
        """The W&B logger, if there is one."""
        return next((x for x in self.trainer.loggers if isinstance(x, WandbLogger)), None)

    def callback(self, kind: type[L.Callback]) -> Any:
        """The trainer's callback of a kind; None if there is none."""
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((c for c in callbacks if isinstance(c, kind)), None)


def fit(run: Run) -> None:
    """Train from scratch or from where the run stopped; write sample, plots and W&B tables.

    A finished run only says again what it found.
    """
    if run.is_finished:
        if run.trainer.is_global_zero:
            left = "nothing is left to train"
            if run.resume is not None and run.resume.step < run.config.trainer.max_steps:
                left = "a larger trainer.patience continues it"
            print(f"{run.directory.path} is finished: {left}")
            print_result(run)
        return
    exit_code = 1
    try:
        if run.trainer.is_global_zero:
            announce(run)
            run.directory.summary.unlink(missing_ok=True)  # a picture means a finished run
        train(run)
        alarm = run.callback(Alarm)
        if alarm and alarm.is_heard and run.trainer.global_step < run.config.trainer.max_steps:
            raise Alarmed(f"step {run.trainer.global_step}: the alarm has stopped this run")
        ending.saved = SAVED
        if run.trainer.is_global_zero:
            conclude(run)
        exit_code = 0
    except Exception as error:
        line, exit_code = explained(error)
        if run.wandb is not None and exit_code in ALERTS:
            run.wandb.alert(ALERTS[exit_code], line)
        raise
    finally:
        if run.wandb is not None:
            run.wandb.finish(exit_code)


def train(run: Run) -> None:
    """Run the training loop; a state that cannot be restored is a CheckpointError.

    While the loop runs, the module computes every σ̄ that weights are divided by, and forward passes
    do not. Left like that, another loop would train this model without constraints.
    """
    start = run.resume
    set_manual_refresh(run.module.model)
    try:
        with handlers_restored():  # Lightning's teardown is left out if saving fails
            run.trainer.fit(run.module, run.data, ckpt_path=start and start.path.absolute())
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        if start is None or run.callback(Checkpoints).started or str(start.path) in str(error):
            raise
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{start.path}: not a state of this run ({kind}{one_line(error)}); commit "
            f"{start.metadata.get('commit')} wrote it"
        ) from error
    finally:
        set_manual_refresh(run.module.model, manual=False)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads may abort a process that ends


def announce(run: Run) -> None:
    """Print model, text and starting point in a few lines."""
    parameters = sum(p.numel() for p in run.module.model.parameters())
    corpus = run.data.corpus
    print(
        f"{run.directory.path}: {parameters:,} parameters, {corpus.sizes['train']:,} {corpus.unit} "
        f"to train on, {run.data.vocabulary.size} symbols"
    )
    trainer, data = run.config.trainer, run.config.data
    read = trainer.max_steps * trainer.accumulate * data.batch_size * data.seq_len
    passes = read / corpus.sizes["train"]
    hint = ": often learnt by heart, so watch val or set trainer.patience=2"
    print(f"{trainer.max_steps:,} steps read the text {passes:.3g} times{hint * (passes > MANY)}")
    if trainer.compile:
        print("the first step compiles every block, which may take minutes")
    if run.trainer.strategy.root_device.type == "cpu" and (missing := native.complaint()):
        print(f"attention is not compiled, which is slower: {missing}")
    if run.resume is not None:
        ending.saved = SAVED
        print(f"continuing from step {run.resume.step}")
    sys.stdout.flush()


def conclude(run: Run) -> None:
    """Write a sample and the summary, hand both to W&B, and print what came of it."""
    sampler = run.callback(Sample)
    sample = (sampler.text or sampler.generate(run.module.eval())) if sampler else ""
    if sample:
        replace_file(run.directory.path / "sample.txt", sample)
        print(f"--- sample ---\n{printable(sample)}\n---")
    curves = read_curves(run.directory.metrics)
    keeper, config = run.callback(CertificateKeeper), run.config
    certificate = keeper and keeper.certificate
    unknown = unknown_rate(run.data.tokens("val"))
    about = run.directory.path.name, config.model.name, config.data.name, unknown
    title = title_of(*about, certificate)
    plot_run(curves, run.directory.summary, sample, five_gram(run.data), title)
    print_result(run)
    checkpoints = run.callback(Checkpoints)
    if checkpoints.is_over:
        since = f"{checkpoints.num_worse} validations without a better one"
        print(f"ended      {since}; a larger trainer.patience continues it")
    elif left := max(0, run.config.trainer.max_steps - run.trainer.global_step):
        print(f"continue   {run.directory.command} ({left} steps are left)")
    if run.wandb is None or checkpoints.best_name is None:
        return
    run.wandb.log_image("view/summary", [run.directory.summary], run.trainer.global_step - 1)
    best = open_checkpoint(run.directory.checkpoints / checkpoints.best_name)
    found = {"step": best.step, "val/bpc": checkpoints.best}
    run.wandb.log_folder(best.path, found | {"certificate": best.metadata.get("certificate")})


def five_gram(data: TextDataModule) -> float | None:
    """Bits per character of a 5-gram on the validation split; None where it would take long."""
    train, val = data.tokens("train"), data.tokens("val")
    if len(train) + len(val) > NGRAM_AT_ONCE:
        return None
    return ngram_baseline(train, val, data.vocabulary.size).bpc


def print_result(run: Run) -> None:
    """Print likelihood, certificate and inversion from the run's files, and what to type next."""
    rows = [row for row in read_rows(run.directory.metrics) if "val/bpc" in row]
    best = min(rows, key=lambda row: float(row["val/bpc"]))
    print(f"val        {best['val/bpc']:.4f} bits per character (step {best['step'] + 1})")
    newest, _ = newest_checkpoint(run.directory.checkpoints)
    if certificate := newest and newest.metadata.get("certificate"):
        print(f"proven     every branch {largest_proven(from_plain(Certificate, certificate), 4)}")
    if "inverse/characters_recovered" in best:
        recovered = percent(best["inverse/characters_recovered"])
        monitor = run.callback(InversionMonitor)
        caveat = "" if monitor is None else monitor.caveat
        what = "symbols" if caveat else "characters"
        print(f"inversion  {recovered} of the {what} recovered{caveat}")
    print(f"folder     {run.directory.path}")
    checkpoint = shlex.quote(f"checkpoint={run.directory.path}")
    line = shlex.quote(first_words(run.data))
    next_ones = {"sample": [f"prompt={line}"], "invert": [f"text={line}"], "evaluate": []}
    for name, words in next_ones.items():
        print(f"{name:<11}{' '.join([*typed(f'{name}.py'), checkpoint, *words])}")


def first_words(data: TextDataModule) -> str:
    """A few words from the beginning of the training text, whose characters the model knows.

    Control characters are left out: typed as they are shown, they would be other characters.
    """
    beginning = data.vocabulary.text(data.tokens("train")[:200])
    lines = CONTROL_CHARACTER.sub("\n", beginning).splitlines()
    return max(lines, key=len)[:30].strip()
