"""From a configuration to a training run: data, model, callbacks, loggers and trainer."""

import logging
import warnings
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy

from invformer.assemble.model import build_model
from invformer.config.load import command_line, to_yaml
from invformer.config.schema import TrainConfig, TrainerConfig
from invformer.data.corpora import read_corpus
from invformer.data.datamodule import TextDataModule
from invformer.data.vocabulary import Vocabulary
from invformer.numerics.precision import FORWARD_DTYPE
from invformer.processes.bar import Bar
from invformer.processes.interruption import Interruption
from invformer.processes.ranks import is_rank, launcher_value
from invformer.runs.checkpoint import Checkpoint
from invformer.runs.files import refuse_link, replace_file
from invformer.runs.json_lines import JsonLinesLogger
from invformer.runs.machine import commit, refuse_missing_requirements, training_device
from invformer.runs.resume import is_complete, resume_point
from invformer.runs.run_directory import RunDirectory, directory_of, is_first_process
from invformer.runs.saving import Checkpoints, DirectoryCheckpointIO, RandomState
from invformer.runs.wandb_logger import open_wandb
from invformer.trained.model import TrainedModel, load
from invformer.training.alarm import Alarm
from invformer.training.callbacks import (
    CertificateKeeper,
    InversionMonitor,
    LastValidation,
    Sample,
    Speed,
)
from invformer.training.fit import Run
from invformer.training.module import CharLanguageModel
from invformer.training.monitor import LipschitzMonitor
from invformer.training.optimizers import build_optimizer, warmup_cosine
from invformer.training.progress import Progress
from invformer.training.rows import Rows

START_SECONDS = 120.0  # in which a process loads what it needs


def build_run(config: TrainConfig) -> Run:
    """Data, model, callbacks and trainer of one run, in a folder of its own."""
    quieten()
    options = config.trainer
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    refuse_missing_requirements(config)
    start = None if config.init_from is None else load(config.init_from, "cpu")
    if start is not None:  # its model, and what belongs to it
        seq_len, vocabulary = start.config.data.seq_len, start.config.data.vocabulary
        read = replace(config.data, seq_len=seq_len, vocabulary=vocabulary)
        config = replace(config, model=start.config.model, data=read)
    with Bar(desc=f"reading {config.data.name}"):
        data = build_data(config, start)
    directory = directory_of(config)
    metadata = build_metadata(config, data)
    resume = resume_point(directory, config, metadata)
    is_finished = directory.summary.exists() and is_complete(resume, options)
    if is_first_process():
        named = replace(config, run=replace(config.run, name=directory.path.name))
        replace_file(directory.config, to_yaml(named))
    is_logged = is_first_process() and not is_finished
    loggers = build_loggers(config, directory, metadata, resume) if is_logged else []
    L.seed_everything(config.run.seed, verbose=False)
    module = build_module(config, data, metadata, start)
    parameters = sum(p.numel() for p in module.parameters())
    for logger in loggers:
        words = {key: metadata[key] for key in ("command", "commit")}
        logger.log_hyperparams({**asdict(config), **words, "parameters": parameters})
    saved = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    trainer = L.Trainer(
        max_steps=options.max_steps,
        val_check_interval=options.val_every * options.accumulate,
        check_val_every_n_epoch=None,
        accelerator=training_device(options).type,
        devices=launcher_value("LOCAL_WORLD_SIZE", 1),
        num_nodes=launcher_value("GROUP_WORLD_SIZE", 1),
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        deterministic=options.deterministic,
        callbacks=build_callbacks(config, directory, module, data, resume),
        # Lightning's own requeueing on a cluster would save behind our back.
        plugins=[
            DirectoryCheckpointIO(saved),
            TorchElasticEnvironment() if is_rank() else LightningEnvironment(),
        ],
        strategy=build_strategy(options),
        logger=loggers,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory.path,
    )
    return Run(config, directory, module, data, trainer, resume, is_finished)


def build_data(config: TrainConfig, start: TrainedModel | None = None) -> TextDataModule:
    """The corpus, its vocabulary from the training split alone or of a model, its windows."""
    data, corpus = config.data, read_corpus(config.data)
    if start is not None:
        vocabulary = start.vocabulary
        vocabulary.require(corpus.read("train"), corpus.source)
    elif data.vocabulary == "bytes":
        vocabulary = Vocabulary.of_bytes()
    else:
        vocabulary = Vocabulary.from_text(corpus.read("train"))
    if data.unknown == "refuse":
        vocabulary.require(corpus.read("val", "test"), corpus.source)
    return TextDataModule(
        corpus,
        vocabulary,
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        eval_batch_size=config.trainer.eval_batch_size,
        seed=config.run.seed,
        max_val_characters=data.max_val_characters,
    )


def build_module(
    config: TrainConfig, data: TextDataModule, metadata: dict[str, Any], start: TrainedModel | None
) -> CharLanguageModel:
    """The model that training begins with, its optimiser and its schedule."""
    optim, trainer = config.optim, config.trainer
    if start is None:
        model = build_model(config.model, data.vocabulary.size, config.data.seq_len)
        model.initialise(data.first_batch(trainer.accumulate)[0])
    else:
        model = start.network.train()
    model.stack.checkpoint_activations = trainer.checkpoint_activations
    # Lightning's plugin would convert it only after a checkpoint was restored, and so rounded.
    model.to(torch.float64 if trainer.precision == "64-true" else torch.float32)
    if trainer.compile:
        for block in model.stack.blocks:
            block.compile()
    return CharLanguageModel(
        model,
        lambda model: build_optimizer(model, optim),
        lambda optimizer: warmup_cosine(
            optimizer, config.warmup_steps, trainer.max_steps, optim.min_lr_fraction
        ),
        metadata,
        optim.grad_clip,
        optim.ema_decay,
        config.run.seed,
        trainer.cuda_graph,
    )


def build_strategy(config: TrainerConfig) -> Strategy | str:
    """One device, or several processes, of which a hanging one is found by the timeout.

    The timeout also covers the start of the processes.
    """
    if not is_rank():
        return "auto"
    timeout = timedelta(seconds=config.rank_timeout + START_SECONDS)
    # Numbers of the host travel between hosts, tensors of a GPU between GPUs.
    backend = "cpu:gloo,cuda:nccl" if training_device(config).type == "cuda" else None
    # Buffers are functions of the weights, and so the same in every process.
    return DDPStrategy(timeout=timeout, process_group_backend=backend, broadcast_buffers=False)


def build_callbacks(
    config: TrainConfig,
    directory: RunDirectory,
    module: CharLanguageModel,
    data: TextDataModule,
    resume: Checkpoint | None,
) -> list[L.Callback]:
    """Certify, measure, then send the rows that were recorded, then save checkpoints."""
    monitor, options = config.monitor, config.trainer
    callbacks: list[L.Callback] = [RandomState()]
    probe, is_invertible = None, module.model.is_invertible
    if is_invertible:
        callbacks.append(CertificateKeeper(directory.certificate, FORWARD_DTYPE[options.precision]))
    if monitor.enabled:
        probe = data.first_windows("train", monitor.num_sequences)[:, : monitor.length]
        callbacks.append(LipschitzMonitor(probe, every=monitor.every, seed=config.run.seed))
        if is_invertible and monitor.inversion:
            text = data.first_windows("val", monitor.inversion_sequences)
            callbacks.append(InversionMonitor(text, data.vocabulary.text))
    if length := options.sample_length:
        prompt = data.first_windows("val", 1)[0, :16]
        callbacks.append(Sample(prompt, length, data.vocabulary.text, config.run.seed))
    rows = Rows(monitor.flush_every, directory.path / "violation.json", probe)
    checkpoints = Checkpoints(directory.checkpoints, resume and resume.path.name, options.patience)
    callbacks += [Speed(monitor.flush_every), rows]
    if monitor.enabled:
        callbacks.append(Alarm(monitor.alarm))
    callbacks.append(checkpoints)
    if is_first_process():
        last, every, bar = options.max_steps, options.val_every, options.progress
        callbacks.append(Progress(directory.metrics, last, every, bar))
    stop = Interruption(rows.send, directory.command)
    return [*callbacks, LastValidation(options.max_seconds), stop]


def build_loggers(
    config: TrainConfig,
    directory: RunDirectory,
    metadata: dict[str, Any],
    resume: Checkpoint | None,
) -> list[Logger]:
    """metrics.jsonl, and what is asked for beside it; notes how W&B knows the run."""
    options, step = config.logger, 0 if resume is None else resume.step
    built: list[Logger] = [JsonLinesLogger(directory.metrics, step)]
    for name in options.name:
        match name:
            case "wandb":
                earlier = resume and resume.metadata.get("wandb")
                wandb = open_wandb(
                    directory.path,
                    mode=options.mode,
                    asked={
                        "project": options.project, "entity": options.entity,
                        "run_group": options.group, "run_notes": options.notes,
                        "run_tags": options.tags, "run_name": None if resume else config.run.name,
                    },
                    defaults={"run_tags": [config.model.name, config.data.name]},
                    earlier=earlier,
                )  # fmt: skip
                if identity := wandb.identity if wandb else earlier:
                    metadata["wandb"] = identity
                built += [wandb] if wandb else []
            case "csv":
                refuse_link(directory.path / name)
                built.append(CSVLogger(directory.path, name))
            case "tensorboard":
                refuse_link(directory.path / name)
                tensorboard = TensorBoardLogger(
                    directory.path, name, version="", default_hp_metric=False, purge_step=step
                )
                built.append(tensorboard)
    return built


def build_metadata(config: TrainConfig, data: TextDataModule) -> dict[str, Any]:
    """What a checkpoint says about itself, in plain values."""
    return {
        "config": asdict(config),
        "command": command_line(config),
        "commit": commit(),
        "vocabulary": data.vocabulary.to_dict(),
        "data_sha256": data.corpus.sha256,
        "data_source": data.corpus.source,
        "versions": {"torch": str(torch.__version__), "lightning": str(L.__version__)},
    }


def quieten() -> None:
    """Keep the frameworks' advertisements and advice out of the user's terminal."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
