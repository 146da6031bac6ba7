"""The folder a run leaves behind: made once, continued or refused, never overwritten."""

import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invformer.config import to_dict
from invformer.config.schema import TrainConfig
from invformer.errors import CheckpointError, ConfigurationError, StorageError
from invformer.runs.checkpoint import CHECKPOINTS, sweep
from invformer.runs.encoding import MAX_BYTES, parse
from invformer.runs.files import PARTIAL, open_regular, replace_file
from invformer.runs.launcher import from_first_rank
from invformer.runs.ranks import is_rank, launcher_value
from invformer.runs.run_lock import LOCK, lock_run

# These may differ between a run and its continuation, since they change no number; devices and
# strategy change the rounding. Another path has to lead to the same text, which is checked apart.
MAY_CHANGE = (
    "data.path", "logger.", "run.", "trainer.devices", "trainer.max_steps", "trainer.max_time",
    "trainer.progress", "trainer.rank_timeout", "trainer.sample_length", "trainer.strategy",
)  # fmt: skip
CONFIG = "config.json"
CONFIG_YAML, METRICS = "config.yaml", "metrics.jsonl"
BEFORE_TRAINING = {LOCK, CONFIG, CONFIG_YAML, METRICS, CHECKPOINTS, "wandb", "csv", "tensorboard"}
MUST_STAY = ("run.seed",)


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run's folder.

    Attributes:
        path: the folder.
        resumed: whether it existed before.
    """

    path: Path
    resumed: bool

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
        return RunDirectory(Path(from_first_rank(None)), resumed=True)
    directory = open_run(
        expand_home(config.run.root),
        config.run.name,
        f"{config.model.name}-{config.data.name}",
        to_dict(config),
        config.run.resume,
    )
    sweep(directory.path)
    sweep(directory.checkpoints)
    if is_rank():
        from_first_rank(str(directory.path.absolute()))
    return directory


def expand_home(path: str) -> Path:
    """The path with the home folder for ``~`` or ``~user``.

    Raises:
        ConfigurationError: there is no such user, or the user has no home folder.
    """
    first, *rest = Path(path).parts or ("",)
    if not first.startswith("~"):
        return Path(path)
    home = os.path.expanduser(first)
    if not os.path.isabs(home) or not os.path.isdir(home):
        raise ConfigurationError(f"run.root: {first} has no home folder here; write the path out")
    return Path(home, *rest)


def open_run(
    root: Path, name: str | None, default_name: str, config: Mapping[str, Any], resume: bool
) -> RunDirectory:
    """Make a new run folder, or reopen one for the same configuration, and lock it.

    Args:
        root: folder that holds the runs.
        name: the run's name; None picks ``default_name`` with the time.
        default_name: readable beginning of such a name.
        config: the resolved configuration as a plain dict; kept beside the run.
        resume: whether an existing run may be continued.

    Raises:
        CheckpointError: the run exists and may not be continued with this configuration, or another
            process is at it.
        StorageError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name is None:
            return RunDirectory(fresh_folder(root, default_name, config), resumed=False)
        path = root / name
        if not path.exists() or has_nothing_to_lose(path):
            path.mkdir(exist_ok=True)
            lock_run(path)
            if has_nothing_to_lose(path):  # still, now that nobody else is at it
                write_config(path, config)
                return RunDirectory(path, resumed=False)
    except OSError as error:
        raise StorageError(f"{root}: cannot create a run folder ({error.strerror})") from error
    if not resume:
        raise CheckpointError(
            f"{path} exists: choose another run.name, or run.resume=true to continue it"
        )
    refuse_other_configuration(path, config)
    lock_run(path)
    return RunDirectory(path, resumed=True)


def has_nothing_to_lose(path: Path) -> bool:
    """Whether a folder has no checkpoint, no metrics, and only files that precede a first step."""
    names = {file.name for file in path.iterdir()} if path.is_dir() else {""}
    names = {name for name in names if not name.startswith((PARTIAL, f"{CONFIG}.partial"))}
    if names <= {LOCK}:
        return True
    if not names <= BEFORE_TRAINING or saved_configuration(path) is None:
        return False
    run = RunDirectory(path, resumed=True)
    return not any(run.checkpoints.glob("*")) and not (
        run.metrics.exists() and run.metrics.stat().st_size
    )


def fresh_folder(root: Path, default_name: str, config: Mapping[str, Any]) -> Path:
    """A folder that did not exist, named after the model, the data and the time."""
    path = first = root / f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in itertools.count(1):
        try:
            path.mkdir()
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{attempt}")
    lock_run(path)
    write_config(path, config)
    return path


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Keep the configuration, to which a continued run is compared."""
    replace_file(path / CONFIG, json.dumps(config, indent=2) + "\n")


def refuse_other_configuration(path: Path, config: Mapping[str, Any]) -> None:
    """Compare with the configuration the run was started with.

    Raises:
        CheckpointError: naming every key that differs, or what is missing.
    """
    before = saved_configuration(path)
    if before is None:
        raise CheckpointError(
            f"{path} exists but holds no run that can be continued: choose another run.name"
        )
    if differing := differing_keys(before, config):
        raise CheckpointError(
            f"{path} was started with another configuration ({'; '.join(differing)}): "
            "choose another run.name, or repeat the old values to continue it"
        )


def saved_configuration(path: Path) -> dict[str, Any] | None:
    """The configuration a run was started with; None if the folder is not that of a run."""
    try:
        with open_regular(path / CONFIG) as file:
            saved = parse(file.read(MAX_BYTES + 1), CONFIG)
    except (OSError, CheckpointError):
        return None
    return saved if isinstance(saved, dict) and "model" in saved else None


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two configurations that one run may not have, in words.

    A key that did not exist when the run began counts with its default, which changes nothing.
    """
    new = dict(flatten(now))
    old = {key: default for key, default in DEFAULTS.items() if key in new} | dict(flatten(before))
    return [
        f"{key} was {old.get(key)!r:.60}, now {new.get(key)!r:.60}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and (key in MUST_STAY or not key.startswith(MAY_CHANGE))
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested dict with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


DEFAULTS = dict(flatten(to_dict(TrainConfig())))
