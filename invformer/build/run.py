"""From a configuration to a training run."""

import logging
import os
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from invformer.build.model import build_model
from invformer.config import command_line, to_dict, to_yaml
from invformer.data.corpora import Corpus, load_corpus
from invformer.data.datamodule import TextDataModule
from invformer.data.vocabulary import Vocabulary
from invformer.schema import DataConfig, TrainConfig
from invformer.training.callbacks import (
    CertificateKeeper,
    Flush,
    InversionMonitor,
    LipschitzMonitor,
    StepProgress,
)
from invformer.training.module import CharLanguageModel
from invformer.training.optimizers import build_optimizer, warmup_cosine
from invformer.training.run_directory import RunDirectory, open_run
from invformer.training.run_log import JsonLinesSink, RunLog, Sink
from invformer.training.saving import Checkpoints, RandomState
from invformer.training.wandb_sink import WandbSink

DIRECTORY_VARIABLE = "INVFORMER_RUN_DIRECTORY"
FORWARD_DTYPE = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "64-true": torch.float64}


@dataclass(frozen=True)
class Run:
    """Everything one training run consists of."""

    config: TrainConfig
    directory: RunDirectory
    module: CharLanguageModel
    data: TextDataModule
    trainer: L.Trainer
    wandb: WandbSink | None


def read_corpus(config: DataConfig) -> Corpus:
    """The text a configuration names, in its splits."""
    return load_corpus(
        config.name,
        config.path,
        val_fraction=config.val_fraction,
        test_fraction=config.test_fraction,
        max_characters=config.max_characters,
    )


def build_data(config: DataConfig, eval_batch_size: int, seed: int) -> TextDataModule:
    """The corpus, its vocabulary from the training split alone, and its windows."""
    corpus = read_corpus(config)
    return TextDataModule(
        corpus,
        Vocabulary.from_text(corpus.train),
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        eval_batch_size=eval_batch_size,
        seed=seed,
    )


def build_run(config: TrainConfig) -> Run:
    """Data, model, callbacks and trainer of one run, in a folder of its own."""
    quieten()
    trainer_config = config.trainer
    if trainer_config.num_threads is not None:
        torch.set_num_threads(trainer_config.num_threads)
    data = build_data(config.data, trainer_config.eval_batch_size, config.run.seed)
    directory = open_directory(config)
    metadata = build_metadata(config, data)
    wandb = build_wandb(config, directory, metadata) if is_first_process() else None
    run_log = build_run_log(directory, wandb) if is_first_process() else RunLog([])
    L.seed_everything(config.run.seed, verbose=False)
    model = build_model(config.model, data.vocabulary.size, config.data.seq_len)
    model.initialise(data.first_batch(trainer_config.devices)[0])
    if trainer_config.compile:
        for block in model.stack.blocks:
            block.compile()
    optim = config.optim
    module = CharLanguageModel(
        model,
        lambda m: build_optimizer(
            m, optim.name, lr=optim.lr, muon_lr=optim.muon_lr,
            betas=(optim.betas[0], optim.betas[1]), weight_decay=optim.weight_decay,
        ),
        lambda o: warmup_cosine(
            o, config.warmup_steps, trainer_config.max_steps, optim.min_lr_fraction
        ),
        run_log,
        metadata,
        optim.grad_clip,
    )  # fmt: skip
    trainer = L.Trainer(
        max_steps=trainer_config.max_steps,
        val_check_interval=min(trainer_config.val_every, trainer_config.max_steps)
        * trainer_config.accumulate,
        check_val_every_n_epoch=None,
        accelerator=trainer_config.accelerator,
        devices=trainer_config.devices,
        precision=trainer_config.precision,
        accumulate_grad_batches=trainer_config.accumulate,
        deterministic=trainer_config.deterministic,
        callbacks=build_callbacks(config, directory, module, data, run_log),
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=trainer_config.progress,
        enable_model_summary=False,
        default_root_dir=directory.path,
    )
    return Run(config, directory, module, data, trainer, wandb)


def is_first_process() -> bool:
    """Whether this process is the one that was started by hand, not one of its ranks."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def open_directory(config: TrainConfig) -> RunDirectory:
    """The run's folder, opened by the first process and handed to the ranks it starts."""
    if not is_first_process():
        return RunDirectory(Path(os.environ[DIRECTORY_VARIABLE]), resumed=True)
    directory = open_run(
        Path(config.run.root),
        config.run.name,
        f"{config.model.name}-{config.data.name}",
        to_dict(config),
        config.run.resume,
    )
    directory.config.write_text(to_yaml(config), encoding="utf-8")
    os.environ[DIRECTORY_VARIABLE] = str(directory.path.absolute())
    return directory


def build_callbacks(
    config: TrainConfig,
    directory: RunDirectory,
    module: CharLanguageModel,
    data: TextDataModule,
    run_log: RunLog,
) -> list[L.Callback]:
    """Monitors first, then the flush that sends what they recorded, then checkpoints."""
    monitor = config.monitor
    callbacks: list[L.Callback] = [RandomState()]
    probe = data.probe("train", monitor.num_sequences) if monitor.enabled else None
    if probe is not None:
        callbacks.append(
            LipschitzMonitor(
                probe, run_log, norms=tuple(monitor.norms),
                every=monitor.every, local_every=config.trainer.val_every,
                num_steps=monitor.num_steps, seed=config.run.seed,
            )
        )  # fmt: skip
    if module.model.is_invertible:
        dtype = FORWARD_DTYPE[config.trainer.precision]
        keeper = CertificateKeeper(directory.certificate, run_log, dtype)
        callbacks.append(keeper)
        if monitor.enabled and monitor.inversion:
            text = data.probe("val", monitor.inversion_sequences)
            callbacks.append(InversionMonitor(text, run_log, keeper))
    batch = config.data.batch_size * config.trainer.accumulate * config.trainer.devices
    characters = batch * config.data.seq_len
    evidence = directory.path / "violation.json"
    callbacks.append(Flush(run_log, monitor.flush_every, characters, evidence, probe))
    callbacks.append(Checkpoints(directory.path))
    if config.trainer.progress:
        callbacks.append(StepProgress(run_log))
    return callbacks


def build_wandb(
    config: TrainConfig, directory: RunDirectory, metadata: dict[str, Any]
) -> WandbSink | None:
    """The W&B run, unless there shall be none."""
    logger = config.logger
    if logger.name == "none" or logger.mode == "disabled":
        return None
    return WandbSink(
        directory.path,
        name=directory.path.name,
        config=metadata,
        project=logger.project,
        mode=logger.mode,
        entity=logger.entity,
        group=directory.path.name if directory.resumed else logger.group,
        tags=[*logger.tags, config.model.name, config.data.name],
    )


def build_run_log(directory: RunDirectory, wandb: WandbSink | None) -> RunLog:
    """metrics.jsonl always, W&B where there is a run."""
    first_step = 0
    if directory.last.exists():
        first_step = torch.load(directory.last, weights_only=True, mmap=True)["global_step"]
    sinks: list[Sink] = [JsonLinesSink(directory.metrics, first_step)]
    if wandb is not None:
        sinks.append(wandb)
    return RunLog(sinks)


def build_metadata(config: TrainConfig, data: TextDataModule) -> dict[str, Any]:
    """What a checkpoint says about itself: plain values only, so that it loads without pickles."""
    return {
        "config": to_dict(config),
        "command": command_line(config),
        "commit": git_commit(),
        "vocabulary": data.vocabulary.to_dict(),
        "data_sha256": data.corpus.sha256,
        "data_source": data.corpus.source,
        "versions": {"torch": str(torch.__version__), "lightning": str(L.__version__)},
    }


def git_commit() -> str | None:
    """The commit of the checkout this program runs from, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def quieten() -> None:
    """Keep the frameworks' advertisements and advice out of the user's terminal."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
