"""The folder a run leaves behind: made once, continued or refused, never overwritten."""

import itertools
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invformer.config.schema import TrainConfig
from invformer.errors import CheckpointError, ConfigurationError, StorageError
from invformer.runs.checkpoint import CHECKPOINTS, read_regular, sweep
from invformer.runs.encoding import parse
from invformer.runs.files import PARTIAL, replace_file
from invformer.runs.launcher import from_first_rank
from invformer.runs.ranks import is_rank, launcher_value
from invformer.runs.run_lock import LOCK, lock_run

CONFIG = "config.json"
CONFIG_YAML, METRICS = "config.yaml", "metrics.jsonl"
BEFORE_TRAINING = {LOCK, CONFIG, CONFIG_YAML, METRICS, CHECKPOINTS, "wandb", "csv", "tensorboard"}


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run's folder.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration as YAML."""
        return self.path / CONFIG_YAML

    @property
    def command(self) -> str:
        """The command that continues the run."""
        return shlex.join(["python", TrainConfig.program, f"config={self.config}"])

    @property
    def metrics(self) -> Path:
        """One JSON object per line, one line per optimiser step."""
        return self.path / METRICS

    @property
    def certificate(self) -> Path:
        """The latest certificate."""
        return self.path / "certificate.json"

    @property
    def summary(self) -> Path:
        """The picture that is drawn last."""
        return self.path / "summary.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS


def is_first_process() -> bool:
    """Whether this process keeps the run's folder."""
    return launcher_value("RANK", 0) == 0


def directory_of(config: TrainConfig) -> RunDirectory:
    """The run's folder, opened by the first process, which tells the others."""
    if not is_first_process():
        return RunDirectory(Path(from_first_rank(None)))
    directory = open_run(
        expand_home(config.run.root),
        config.run.name,
        f"{config.model.name}-{config.data.name}",
        config.run.resume,
    )
    sweep(directory.path)
    sweep(directory.checkpoints)
    if is_rank():
        from_first_rank(str(directory.path.absolute()))
    return directory


def expand_home(path: str) -> Path:
    """The path with the home folder for ``~`` or ``~user``; raises ConfigurationError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigurationError(
            f"run.root: {user} has no home folder here; write the path out"
        ) from None


def open_run(root: Path, name: str | None, default_name: str, resume: bool) -> RunDirectory:
    """Make a run folder, or reopen one, and lock it.

    Args:
        root: folder that holds the runs.
        name: the run's name; None picks ``default_name`` with the time.
        default_name: readable beginning of such a name.
        resume: whether an existing run may be continued.

    Raises:
        CheckpointError: the run exists and may not be continued, or another process is at it.
        StorageError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = fresh_folder(root, default_name) if name is None else root / name
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{root}: cannot create a run folder ({error.strerror})") from error
    if is_begun(path):
        if not resume:
            raise CheckpointError(
                f"{path} exists: choose another run.name, or run.resume=true to continue it"
            )
        if saved_configuration(path) is None:
            raise CheckpointError(
                f"{path} exists but holds no run that can be continued: choose another run.name"
            )
    lock_run(path)
    return RunDirectory(path)


def is_begun(path: Path) -> bool:
    """Whether a folder has a checkpoint, metrics, or other files than precede a first step."""
    names = {file.name for file in path.iterdir() if not file.name.startswith(PARTIAL)} - {LOCK}
    if not names:
        return False
    if not names <= BEFORE_TRAINING or saved_configuration(path) is None:
        return True
    run = RunDirectory(path)
    return any(run.checkpoints.glob("*")) or (
        run.metrics.exists() and run.metrics.stat().st_size > 0
    )


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


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Keep the configuration, to which a continued run is compared."""
    replace_file(path / CONFIG, json.dumps(config, indent=2) + "\n")


def saved_configuration(path: Path) -> dict[str, Any] | None:
    """The configuration a run was started with; None if the folder is not that of a run."""
    try:
        saved = parse(read_regular(path / CONFIG), CONFIG)
    except CheckpointError:
        return None
    return saved if isinstance(saved, dict) and "model" in saved else None
