"""The folder a run leaves behind: made once, continued or refused, never overwritten."""

import itertools
import os
import shlex
import time
from pathlib import Path

from invformer.config.load import load_config, typed
from invformer.config.schema import TrainConfig
from invformer.errors import CheckpointError, ConfigurationError, StorageError
from invformer.processes.launcher import from_first_rank
from invformer.processes.ranks import REPORTS, is_rank, launcher_value
from invformer.runs.checkpoint import CHECKPOINTS, sweep
from invformer.runs.files import LOCK, PARTIAL, lock_run, read_regular

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
BEFORE_TRAINING = {LOCK, CONFIG, METRICS, CHECKPOINTS, "wandb", "csv", "tensorboard"}


class RunDirectory:
    """Paths inside one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG  # with every value resolved
        self.metrics = path / METRICS  # one JSON object for every optimiser step
        self.certificate = path / "certificate.json"  # the latest
        self.summary = path / "summary.png"  # drawn last
        self.checkpoints = path / CHECKPOINTS
        words = typed(TrainConfig.program)
        if is_rank() and REPORTS not in os.environ:  # under the user's own torchrun
            sizes = {"nnodes": "GROUP_WORLD_SIZE", "nproc-per-node": "LOCAL_WORLD_SIZE"}
            options = [f"--{key}={os.environ[name]}" for key, name in sizes.items()]
            words = ["torchrun", *options, TrainConfig.program]
        self.command = shlex.join([*words, f"config={path}"])


def is_first_process() -> bool:
    """Whether this process keeps the run's folder."""
    return launcher_value("RANK", 0) == 0


def directory_of(config: TrainConfig) -> RunDirectory:
    """The run's folder, opened by the first process, which tells the others."""
    if not is_first_process():
        return RunDirectory(Path(from_first_rank(None)))
    run, default_name = config.run, f"{config.model.name}-{config.data.name}"
    directory = open_run(Path(os.path.expanduser(run.root)), run.name, default_name, run.resume)
    sweep(directory.path)
    sweep(directory.checkpoints)
    if is_rank():
        from_first_rank(str(directory.path.absolute()))
    return directory


def open_run(root: Path, name: str | None, default_name: str, resume: bool) -> RunDirectory:
    """Make a run folder, or if ``resume`` allows that reopen one, and lock it.

    Without a name it gets the default name with the time.

    Raises:
        CheckpointError: the run exists and may not be continued, or another process is at it.
        StorageError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = fresh_folder(root, default_name) if name is None else root / name
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{error.filename}: cannot create a run folder ({error.strerror})"
        ) from error
    if is_begun(path) and not resume:
        raise CheckpointError(
            f"{path} exists: choose another run.name, or run.resume=true to continue it"
        )
    if names_in(path) - {LOCK}:
        saved_configuration(path)
    lock_run(path)
    return RunDirectory(path)


def is_begun(path: Path) -> bool:
    """Whether a folder has a checkpoint, metrics, or other files than precede a first step."""
    run = RunDirectory(path)
    has_rows = run.metrics.exists() and run.metrics.stat().st_size > 0
    return has_rows or any(run.checkpoints.glob("*")) or not names_in(path) <= BEFORE_TRAINING


def names_in(path: Path) -> set[str]:
    """The files of a folder, except what was being written when a process was killed."""
    return {file.name for file in path.iterdir() if not file.name.startswith(PARTIAL)}


def fresh_folder(root: Path, default_name: str) -> Path:
    """A folder that did not exist, named after the model, the data and the time."""
    path = first = root / f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in itertools.count(1):
        try:
            path.mkdir()
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{attempt}")
    return path


def saved_configuration(path: Path) -> TrainConfig:
    """The configuration a run was started with; raises CheckpointError if there is none."""
    try:
        read_regular(path / CONFIG)  # from a pipe there would be no end of reading
        return load_config([f"config={path / CONFIG}"])
    except (OSError, ConfigurationError) as error:
        raise CheckpointError(
            f"{path} exists but holds no run that can be continued ({error}): "
            "choose another run.name"
        ) from None
