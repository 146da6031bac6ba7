"""What a checkpoint says, file by file.

``model.json`` and ``weights.safetensors`` are the model: what evaluating needs. ``state.json`` and
``state.safetensors`` are where training continues: optimiser, schedule, random generators, loop and
sampler positions, the callbacks' memory. Everything is checked as far as it can be without the
program that wrote it; who reads it compares it with what it needs.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from invformer.errors import CheckpointError, NonFiniteError, StorageError
from invformer.runs.checkpoint_directory import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    read_manifest,
    saved_in,
    write_directory,
)
from invformer.runs.strict_json import dump, parse
from invformer.runs.tensors import (
    MAX_HEADER,
    Spec,
    first_non_finite,
    from_bytes,
    num_bytes,
    read_specs,
    refuse_other_specs,
    to_bytes,
)
from invformer.runs.tree import pack, unpack

MODEL = "model.json"
WEIGHTS = "weights.safetensors"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"

# Reading takes a file's size twice.
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
LIMITS = {MODEL: 4 << 20, WEIGHTS: MEMORY // 3, STATE: 16 << 20, STATE_TENSORS: MEMORY // 3}
# Optimisers keep twice the weights; the monitor's vectors are small unless the probe text is long.
STATE_PER_WEIGHT, STATE_SLACK = 64, 64 << 20
MAX_STEP = 10**9

REQUIRED = {"step": int, "config": dict, "vocabulary": dict, "data_sha256": str}
OPTIONAL = {
    "epoch", "command", "commit", "data_source", "versions", "certificate", "best", "wandb_run_id",
}  # fmt: skip
STATE_KEYS = {
    "epoch", "loops", "callbacks", "optimizer_states", "lr_schedulers", "data",
}  # fmt: skip
# Where the saved weights are an average: those that learn.
LEARNING = "learning_weights"
EVALUATION = "evaluation.json"
# Of the language model's weights in the module that was trained.
PREFIX = "model."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest fits its files and whose ``model.json`` was read.

    Attributes:
        path: its directory.
        manifest: sizes and hashes of its files.
        metadata: configuration, vocabulary and provenance, as saved with the run: plain values.
    """

    path: Path
    manifest: Manifest
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self.metadata["step"]

    @property
    def sha256(self) -> str:
        """Stands for everything in the checkpoint."""
        return self.manifest.sha256

    @property
    def evaluation(self) -> Path:
        """Where results belong: in the run's folder, or beside a checkpoint outside a run.

        The names that were typed say where that is, even if the folder of checkpoints is a link to
        another disk. Names such as ``.`` or a link to one checkpoint do not say it.
        """
        folder = self.path.parent
        if folder.name != CHECKPOINTS or self.path.is_symlink():
            folder = self.path.resolve().parent
        if folder.name == CHECKPOINTS:
            return folder.parent / EVALUATION
        return folder / f"{self.path.resolve().name}.{EVALUATION}"

    @property
    def weight_bytes(self) -> int:
        """Size of the file with the weights, not yet verified."""
        return self.manifest.files[WEIGHTS].size

    def read_weights(self, wanted: Mapping[str, Spec]) -> dict[str, Tensor]:
        """The weights, on the CPU.

        Args:
            wanted: what they must be.

        Raises:
            CheckpointError: they are damaged, others than wanted, or not finite.
        """
        where = str(self.path / WEIGHTS)
        need, have = num_bytes(wanted), self.weight_bytes
        if not need <= have <= need + MAX_HEADER:
            raise CheckpointError(
                f"{where}: its weights do not fit its configuration: {have} bytes, the model's "
                f"weights take {need}"
            )
        content = self.manifest.read(WEIGHTS)
        refuse_other_specs(read_specs(content, where), wanted, where)
        weights = from_bytes(content, where)
        if name := first_non_finite(weights):
            raise CheckpointError(f"{where}: weight {name} is not finite")
        return weights

    def read_state(self) -> dict[str, Any]:
        """Where training continues: plain values and tensors on the CPU.

        Raises:
            CheckpointError: it is damaged, too large, not finite, or no state of a training run.
        """
        where, beside = str(self.path / STATE), str(self.path / STATE_TENSORS)
        size = self.manifest.files[STATE_TENSORS].size
        if size > state_limit(self.weight_bytes):
            raise CheckpointError(f"{beside}: {size} bytes are too many for these weights")
        plain = parse(self.manifest.read(STATE), where)
        content = self.manifest.read(STATE_TENSORS)
        read_specs(content, beside)
        tensors = from_bytes(content, beside)
        if name := first_non_finite(that_learn(tensors)):
            raise CheckpointError(f"{beside}: {name} is not finite")
        state = unpack(plain, tensors, where)
        if not isinstance(state, dict) or state.keys() - {LEARNING} != STATE_KEYS:
            raise CheckpointError(f"{where}: not the state of a training run")
        return state


def write_checkpoint(
    path: Path, metadata: dict[str, Any], weights: Mapping[str, Tensor], state: dict[str, Any]
) -> None:
    """Save a model and where its training continues.

    Args:
        path: the directory to make.
        metadata: see ``REQUIRED`` and ``OPTIONAL``.
        weights: the model's parameters and buffers by name.
        state: see ``STATE_KEYS`` and ``LEARNING``; plain values and tensors.

    Raises:
        NonFiniteError: a weight or the optimiser's state is not finite; nothing is written.
        StorageError: the directory cannot be written, or is too large; nothing is left of it.
    """
    parts = state.keys() - {LEARNING}
    if unknown := metadata.keys() - REQUIRED.keys() - OPTIONAL | parts ^ STATE_KEYS:
        raise ValueError(f"a checkpoint does not know, or lacks, {sorted(unknown)}")
    plain, tensors = pack(state)
    for name in (first_non_finite(weights), first_non_finite(that_learn(tensors))):
        if name is not None:
            raise NonFiniteError(
                f"step {metadata['step']}: {name} is not finite and is not saved; lower optim.lr "
                "or set optim.grad_clip (the last good checkpoint is kept)"
            )
    files = {
        MODEL: dump(metadata),
        WEIGHTS: to_bytes(weights),
        STATE: dump(plain),
        STATE_TENSORS: to_bytes(tensors),
    }
    limits = LIMITS | {STATE_TENSORS: state_limit(len(files[WEIGHTS]))}
    for name, content in files.items():
        if len(content) > limits[name]:
            raise StorageError(
                f"{path / name}: {len(content)} bytes, over the {limits[name]} that would be read "
                "back; lower monitor.num_sequences"
            )
    write_directory(path, files)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint says about itself; no tensor is read, nothing in it is ever run.

    Raises:
        CheckpointError: not a checkpoint of this format, or a damaged one.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path}: a checkpoint is a directory with a {MANIFEST}; single files such as *.ckpt "
            "are pickles, which can run code, and are not opened"
        )
    manifest = read_manifest(path, LIMITS)
    where = str(path / MODEL)
    metadata = parse(manifest.read(MODEL), where)
    if not isinstance(metadata, dict) or metadata.keys() - REQUIRED.keys() - OPTIONAL:
        raise CheckpointError(f"{where}: holds what no model is described by")
    for key, kind in REQUIRED.items():
        if type(metadata.get(key)) is not kind:
            raise CheckpointError(f"{where}: {key} is missing or of another type")
    if not 0 <= metadata["step"] <= MAX_STEP:
        raise CheckpointError(f"{where}: step {metadata['step']:.3g} is out of range")
    return Checkpoint(path, manifest, metadata)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a folder that verifies, and why newer ones were refused.

    Raises:
        CheckpointError: there are checkpoints, and none verifies.
    """
    refused: list[str] = []
    for path in saved_in(folder):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.manifest.verify()
        except CheckpointError as error:
            refused.append(str(error))
            continue
        return checkpoint, refused
    if refused:
        raise CheckpointError(f"{refused[0]}; no other checkpoint in {folder} is whole")
    return None, []


def state_limit(weights: int) -> int:
    """Bytes that ``state.safetensors`` may have beside that many bytes of weights."""
    return STATE_PER_WEIGHT * weights + STATE_SLACK


def that_learn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state that must be finite: a monitor may find that a vector is not."""
    parts = ("optimizer_states", LEARNING)
    return {name: t for name, t in tensors.items() if name.startswith(parts)}
