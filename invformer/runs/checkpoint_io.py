"""How Lightning's checkpoints become directories and back: no pickle, no address, no switch.

Lightning hands over one nested dict, and gets the same one back. Its own version is not kept: a
checkpoint is only read by the program that knows its format, so Lightning migrates nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import CheckpointIO

from invformer.errors import CheckpointError
from invformer.runs.checkpoint import open_checkpoint, write_checkpoint
from invformer.runs.tensors import Spec

DATA = "TextDataModule"
METADATA = "invformer"


class DirectoryCheckpointIO(CheckpointIO):
    """Lightning's plugin for checkpoints as directories.

    Args:
        wanted: the module's parameters and buffers, to which weights are compared before any
            tensor is made.
    """

    def __init__(self, wanted: Mapping[str, Spec]) -> None:
        self.wanted = wanted

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a directory; Lightning calls this in the first process only.

        Raises:
            NonFiniteError: the state is not finite; nothing is written.
            StorageError: it cannot be written; nothing is left of it.
        """
        state = dict(checkpoint)
        state["data"] = state.pop(DATA)
        metadata = {**state.pop(METADATA), "step": state.pop("global_step")}
        weights = state.pop("state_dict")
        del state["pytorch-lightning_version"]
        write_checkpoint(Path(path), metadata, weights, state)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a directory, verified, onto the CPU; ``weights_only`` means nothing here.

        Raises:
            CheckpointError: an address, or not a whole checkpoint of this module.
        """
        if "://" in str(path):
            raise CheckpointError(f"{path}: only local checkpoints are opened")
        saved = open_checkpoint(Path(path))
        weights, state = saved.read_weights(self.wanted), saved.read_state()
        state[DATA] = state.pop("data")
        return {
            **state,
            METADATA: saved.metadata,
            "global_step": saved.step,
            "state_dict": weights,
            "pytorch-lightning_version": L.__version__,
        }

    def remove_checkpoint(self, path: Any) -> None:
        """Nobody asks for that: old checkpoints are pruned where they are written."""
        raise NotImplementedError
