"""A checkpoint: a directory of files and their manifest, complete under its name or not there.

docs/reliability.md says what each file holds, and how checkpoints are written and read. One without
a state, beside files of other purposes, is a model to share: an export.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from invformer.config.load import from_dict
from invformer.config.schema import SavedPath, TrainConfig
from invformer.errors import CheckpointError, ConfigurationError, NonFiniteError, StorageError
from invformer.runs import encoding
from invformer.runs.files import PARTIAL, make_folder, read_regular, sync_folder, write_new
from invformer.runs.packed import BITS, unpacked
from invformer.runs.run_log import MAX_STEP

CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints
MANIFEST = "MANIFEST.json"
MODEL, WEIGHTS = "model.json", "weights.safetensors"
STATE, STATE_TENSORS = "state.json", "state.safetensors"
FILES = (MODEL, WEIGHTS, STATE, STATE_TENSORS)
NAME = re.compile(r"step-(\d{8,12})(?:-(\d{1,6}))?")
MAX_HEADER = 4 << 20  # bytes of a safetensors file beside its tensors
MAX_JSON = 64 << 20  # bytes of model.json, whose vocabulary is the largest part
OLD_MANIFEST = "manifest.json"  # of exports of 0.1
WEIGHT_BITS = "weight_bits"  # in metadata, if matrices are stored in so many bits

CHANGES = "changes"  # in metadata: what was changed on request, and from which step on
STATE_KEYS = {"epoch", "loops", "callbacks", "optimizer_states", "lr_schedulers", "data"}
LEARNING = "learning_weights"  # beside saved weights that are their average
EVALUATION = "evaluation.json"
LFS = b"version https://git-lfs.github.com/spec/"  # what stands for a file in a Git repository
PREFIX = "model."  # of the language model's weights in the module that was trained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest fits its files and whose ``model.json`` was read."""

    path: Path  # what it is called, and where its evaluations lie
    files: Mapping[str, Any]  # the manifest's record of each, see :func:`record_of`
    sha256: str  # of the manifest, and so of everything in the checkpoint
    metadata: dict[str, Any]  # configuration, vocabulary and provenance, in plain values
    cache: Path | None = None  # the Hub's folder for it, whose links are followed

    @property
    def is_shared(self) -> bool:
        """Whether it is a model to share, without a state of training."""
        return STATE not in self.files

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self.metadata["step"]

    @property
    def evaluation(self) -> Path:
        """Where results belong: in the run's folder, or beside a checkpoint outside a run."""
        resolved = self.path.resolve()
        # The typed name comes first, because ``checkpoints`` may be a link to another disk. Behind
        # ``.`` or a link to one checkpoint only the resolved name shows the run.
        for path in [resolved] if self.path.is_symlink() else [self.path, resolved]:
            if path.parent.name == CHECKPOINTS and NAME.fullmatch(path.name):
                return path.parent.parent / EVALUATION
        return resolved.with_name(f"{resolved.name}.{EVALUATION}")

    def configuration(self, **instead: Any) -> TrainConfig:
        """The configuration of its training, with sections ``instead``; raises CheckpointError."""
        try:
            config = from_dict({**self.metadata["config"], **instead})
        except ConfigurationError as error:
            commit = self.metadata.get("commit")
            raise CheckpointError(
                f"{self.path}: its configuration is invalid ({error}); commit {commit} wrote it"
            ) from None
        if config.data.path is not None:
            config.data.path = SavedPath(config.data.path)
        return config

    def verified(self) -> "Checkpoint":
        """The same once every file was compared with its hash; raises CheckpointError."""
        for name in self.files:
            self.read(name)
        return self

    def read(self, name: str, most: int | None = None) -> bytes:
        """The content of a file, verified, of so many bytes at most; raises CheckpointError."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: a model without {name}, from which no run goes on")
        content = self.content(name, most)
        if content.startswith(LFS):
            raise CheckpointError(f"{self.path}: {name} is a pointer of Git LFS: `git lfs pull`")
        if record_of(content) != self.files[name]:
            raise CheckpointError(
                f"{self.path}: {name} is damaged or was changed (size or SHA-256 differ from "
                f"{MANIFEST})"
            )
        return content

    def content(self, name: str, most: int | None = None) -> bytes:
        """The content of a file, not verified."""
        file = self.path / name if self.cache is None else (self.cache / name).resolve()
        try:
            return read_regular(file, most)
        except OSError as error:  # a run that goes on deletes old checkpoints
            raise unreadable(error) from None

    def read_weights(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, on the CPU, once the file has the size that the wanted ones explain.

        Raises:
            CheckpointError: they have other names, types or shapes than the wanted ones, which may
                be on ``meta``; or they are damaged, or not finite.
        """
        file, bits = self.path / WEIGHTS, self.metadata.get(WEIGHT_BITS)
        where = f"{file}: its weights do not fit its configuration"
        need = sum(tensor.nbytes for tensor in wanted.values())
        least = need if bits is None else need * bits // 64  # of float64 matrices
        content = self.read(WEIGHTS, need + MAX_HEADER)
        if len(content) < least:
            raise CheckpointError(f"{where}: {len(content)} bytes, the model takes {least}")
        weights = encoding.from_bytes(content, str(file))
        if bits is not None:
            try:
                weights = unpacked(weights, wanted, bits)
            except (KeyError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"{where}: {error}") from None
        found, asked = encoding.described(weights), encoding.described(wanted)
        for name in {**asked, **found}:
            if found.get(name) != asked.get(name):
                raise CheckpointError(
                    f"{where}: {name!r:.80} is {found.get(name, 'absent')}, the model has "
                    f"{asked.get(name, 'none')}"
                )
        if name := encoding.first_non_finite(weights):
            raise CheckpointError(f"{file}: weight {name} is not finite")
        return weights

    def read_state(self) -> dict[str, Any]:
        """Where training continues: plain values and CPU tensors; raises CheckpointError."""
        where, beside = str(self.path / STATE), str(self.path / STATE_TENSORS)
        tensors = encoding.from_bytes(self.read(STATE_TENSORS), beside)
        if name := encoding.first_non_finite(must_be_finite(tensors)):
            raise CheckpointError(f"{beside}: {name} is not finite")
        state = encoding.unpack(encoding.parse(self.read(STATE), where), tensors, where)
        if not isinstance(state, dict) or state.keys() - {LEARNING} != STATE_KEYS:
            raise CheckpointError(f"{where}: not the state of a training run")
        return state


def must_be_finite(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of optimisers and weights in a state: a monitor's vectors may be NaN."""
    parts = ("optimizer_states", LEARNING)
    return {name: t for name, t in tensors.items() if name.startswith(parts)}


def record_of(content: bytes) -> dict[str, Any]:
    """What the manifest says about a file."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def unreadable(error: OSError) -> CheckpointError:
    """The error for a file of a checkpoint that cannot be read."""
    return CheckpointError(f"{error.filename}: cannot be read ({error.strerror})")


def open_checkpoint(path: Path, cache: Path | None = None) -> Checkpoint:
    """Read a checkpoint's manifest and ``model.json``, no tensor; raises CheckpointError.

    With a ``cache`` its files lie in that folder of the Hub's.
    """
    empty = Checkpoint(path, {}, "", {}, cache)
    try:
        names = set(os.listdir(cache or path))
    except NotADirectoryError:
        raise CheckpointError(
            f"{path}: a checkpoint is a directory with a {MANIFEST}; single files such as *.ckpt "
            "are pickles, which can run code, and are not opened"
        ) from None
    except OSError as error:
        raise unreadable(error) from None
    if OLD_MANIFEST in names and MANIFEST not in names:
        raise CheckpointError(f"{path}: an export of invformer 0.1: export its run again")
    content = empty.content(MANIFEST, MAX_HEADER)
    match encoding.parse(content, str(path / MANIFEST)):
        case {"format": "invformer checkpoint", "version": 1, "files": dict(files)}:
            pass
        case _:
            raise CheckpointError(f"{path / MANIFEST}: no manifest of a checkpoint of version 1")
    checkpoint = replace(empty, files=files, sha256=hashlib.sha256(content).hexdigest())
    # Hidden files, such as .DS_Store, are of whoever looks at folders; none is ever read.
    listed = {name for name in names if not name.startswith(".")} - {MANIFEST}
    if files.keys() == {MODEL, WEIGHTS}:  # a model to share, beside which other files may lie
        differing = files.keys() - listed
    else:
        differing = listed ^ files.keys() | files.keys() ^ set(FILES)
    if differing:
        raise CheckpointError(
            f"{path}: not a checkpoint, {min(differing)!r:.80} is missing or does not belong there"
        )
    metadata = encoding.parse(checkpoint.read(MODEL, MAX_JSON), str(path / MODEL))
    return replace(checkpoint, metadata=checked_metadata(metadata, path / MODEL))


def checked_metadata(metadata: Any, path: Path) -> dict[str, Any]:
    """What a model says about itself in a file; raises CheckpointError if a part is missing."""
    match metadata:
        case {"step": int(step), "config": dict(), "vocabulary": dict(), "data_sha256": str()} if (
            0 <= step <= MAX_STEP
            and isinstance(metadata.get(CHANGES, []), list)
            and metadata.get(WEIGHT_BITS) in (None, *BITS)
        ):
            return metadata
    raise CheckpointError(
        f"{path}: a step, config, vocabulary or data_sha256 is missing or of another type"
    )


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a folder, and why newer ones were refused.

    None if there are no checkpoints; a CheckpointError if there are, but none is whole.
    """
    refused: list[str] = []
    for path in saved_in(folder):
        try:
            return open_checkpoint(path).verified(), refused
        except CheckpointError as error:
            refused.append(str(error))
    if refused:
        raise CheckpointError(f"{refused[0]}; no other checkpoint in {folder} is whole")
    return None, []


def read_checkpoint(path: str) -> Checkpoint:
    """Open one checkpoint, or the best of a run folder (else the newest), and run no code in it.

    A damaged one in a run folder is passed over with a warning; so is a best one that is gone.
    If nothing is left, CheckpointError is raised.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if folder.is_file() or any((folder / m).exists() for m in (MANIFEST, OLD_MANIFEST)):
            return open_checkpoint(folder)
        newest, refused = newest_checkpoint(folder / CHECKPOINTS)
        if newest is None:
            wanted = "holds no checkpoint" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"{folder} {wanted}: name a run folder or a checkpoint in it")
        found = best_checkpoint(newest)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(f"{path:.200}: cannot be read ({error.strerror})") from None
    for reason in refused:
        log.warning("%s; taking %s", reason, found.path.name)
    return found


def best_checkpoint(newest: Checkpoint) -> Checkpoint:
    """The best checkpoint, which the newest names; with a warning the newest if it is lost."""
    name, folder = newest.metadata.get("best"), newest.path.parent
    if name in (None, newest.path.name):
        return newest
    path = folder / str(name)
    try:
        if path not in saved_in(folder):
            raise CheckpointError(f"{folder}: the best checkpoint is not there any more")
        return open_checkpoint(path).verified()
    except CheckpointError as error:
        log.warning("%s; taking %s, the newest, not the best", error, newest.path.name)
        return newest


def saved_in(folder: Path) -> list[Path]:
    """The directories that are named like checkpoints, newest first; links are none."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = NAME.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append(((int(name[1]), int(name[2] or 0)), path))
    return [path for _, path in sorted(found, reverse=True)]


def name_for(folder: Path, step: int) -> str:
    """``step-00001500``, or ``step-00001500-1`` where that is taken: nothing is overwritten."""
    first = f"step-{step:08d}"
    taken = [NAME.fullmatch(p.name) for p in saved_in(folder) if p.name.startswith(first)]
    serials = [int(name[2] or 0) for name in taken if name and int(name[1]) == step]
    return f"{first}-{max(serials) + 1}" if serials else first


def keep_only(folder: Path, names: Collection[str | None]) -> None:
    """Delete all other checkpoints of a folder; each loses its name before its content."""
    for path in saved_in(folder):
        if path.name not in names:
            os.rename(path, path.with_name(PARTIAL + path.name))
    sweep(folder)


def sweep(folder: Path) -> None:
    """Delete what a killed process was writing or deleting."""
    for path in folder.glob(PARTIAL + "*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def encode(
    metadata: dict[str, Any], weights: Mapping[str, Tensor], state: dict[str, Any]
) -> dict[str, bytes]:
    """The files of a checkpoint, but for its manifest.

    Args:
        metadata: what :func:`open_checkpoint` requires, and provenance.
        weights: the model's parameters and buffers by name.
        state: see ``STATE_KEYS`` and ``LEARNING``; plain values and tensors.

    Raises:
        NonFiniteError: a weight or the optimiser's state is not finite.
    """
    plain, tensors = encoding.pack(state)
    if name := encoding.first_non_finite({**weights, **must_be_finite(tensors)}):
        raise NonFiniteError.at(metadata["step"], f"{name} is not finite and is not saved")
    return {
        MODEL: encoding.dump(metadata),
        WEIGHTS: encoding.to_bytes(weights),
        STATE: encoding.dump(plain),
        STATE_TENSORS: encoding.to_bytes(tensors),
    }


def write_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Make a directory of files and their manifest, on the disk; StorageError leaves nothing."""
    partial = target.with_name(PARTIAL + target.name)
    try:
        make_folder(target.parent)
        partial.mkdir(exist_ok=True)
        for name, content in files.items():
            write_new(partial / name, content)
        write_new(partial / MANIFEST, manifest_of(files))
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{target}: cannot be written ({error.strerror}); earlier checkpoints are kept"
        ) from error


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """The manifest of files with these contents."""
    records = {name: record_of(content) for name, content in files.items()}
    return encoding.dump({"format": "invformer checkpoint", "version": 1, "files": records})
