"""What must be the same for a run to continue: before its state is restored, and after."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from invformer.errors import CheckpointError, DataError
from invformer.runs.checkpoint import Checkpoint, newest_checkpoint
from invformer.runs.run_directory import differing_keys

# The tensors an optimiser keeps for each parameter, all of which have gradients.
MEMORY_OF = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}

LAST_BATCH = 1 << 48
# Of a schedule: the rates of now, which depend on how many steps are asked for by now.
RATES = "_last_lr"

log = logging.getLogger(__name__)


def resume_point(folder: Path, metadata: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint a run continues from: the newest that verifies; None for a new run.

    A damaged one is passed over with a warning.

    Args:
        folder: the run's checkpoints.
        metadata: what this run would write into its checkpoints.

    Raises:
        CheckpointError: none verifies, or it belongs to another run.
        DataError: the text is not what the run was started with.
    """
    newest, refused = newest_checkpoint(folder)
    if newest is None:
        if (folder.parent / "last.ckpt").exists():
            raise CheckpointError(
                f"{folder.parent / 'last.ckpt'}: a checkpoint of an earlier version, a pickle, "
                "which can run code and is not opened; choose another run.name"
            )
        return None
    for reason in refused:
        log.warning("%s; continuing from %s", reason, newest.path.name)
    refuse_other_run(newest, metadata)
    return newest


def refuse_other_run(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> None:
    """Compare text, vocabulary and configuration with those of this run.

    Raises:
        CheckpointError: another configuration or vocabulary.
        DataError: another text.
    """
    saved = checkpoint.metadata
    if differing := differing_keys(saved["config"], metadata["config"]):
        raise CheckpointError(
            f"{checkpoint.path}: of a run with another configuration ({'; '.join(differing)})"
        )
    step, asked = saved["step"], metadata["config"]["trainer"]["max_steps"]
    if step > asked:
        raise CheckpointError(
            f"{checkpoint.path}: the run is at step {step}, past trainer.max_steps={asked}: ask "
            "for more steps, or choose another run.name"
        )
    if saved["data_sha256"] != metadata["data_sha256"]:
        raise DataError(
            f"the text changed since the run began: {metadata['data_source']} has SHA-256 "
            f"{metadata['data_sha256'][:12]}…, {checkpoint.path} was trained on "
            f"{saved['data_sha256'][:12]:.12}…; restore the text or choose another run.name"
        )
    if saved["vocabulary"] != metadata["vocabulary"]:
        raise CheckpointError(f"{checkpoint.path}: its vocabulary is not that of the run's text")


def refuse_other_parts(trainer: L.Trainer, saved: Mapping[str, Any], position: str) -> None:
    """Whether a checkpoint has everything that Lightning restores only if it is there.

    Args:
        trainer: the trainer, about to restore its state.
        saved: the checkpoint as Lightning holds it.
        position: the key of the sampler's position in it.

    Raises:
        CheckpointError: naming what is missing or too much.
    """
    where = f"{trainer.ckpt_path}"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    wanted = {c.state_key for c in callbacks if type(c).state_dict is not L.Callback.state_dict}
    if differing := wanted ^ saved["callbacks"].keys():
        raise CheckpointError(
            f"{where}: not a state of this run ({min(differing):.60} is missing or unknown)"
        )
    for key in ("optimizer_states", "lr_schedulers"):
        if not isinstance(saved[key], list) or len(saved[key]) != 1:
            raise CheckpointError(f"{where}: {key} is not a list of one")
    refuse_other_progress(trainer, saved)
    numbers = saved[position].values()
    plain = all(type(number) is int and 0 <= number < LAST_BATCH for number in numbers)
    if not plain or saved[position]["global_step"] != saved["global_step"]:
        raise CheckpointError(f"{where}: its position in the text is none of its step")


def refuse_other_progress(trainer: L.Trainer, saved: Mapping[str, Any]) -> None:
    """Whether the loop's counters are those of a step: a loop that is further on does nothing.

    Args:
        trainer: the trainer, about to restore its state.
        saved: the checkpoint as Lightning holds it.

    Raises:
        CheckpointError: they are none, or of another step.
    """
    where, step = f"{trainer.ckpt_path}", saved["global_step"]
    loop = saved["loops"]["fit_loop"]
    if not is_like(loop, trainer.fit_loop.state_dict()):
        raise CheckpointError(f"{where}: its loops are not those of this program")
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    batches = loop["epoch_loop.batch_progress"]
    completed = [batches[part]["completed"] for part in ("total", "current")]
    wanted = [step * trainer.accumulate_grad_batches] * 2
    if steps["total"]["completed"] != step or completed != wanted:
        raise CheckpointError(f"{where}: of step {step}, but its loops are at another")


def is_like(saved: Any, fresh: Any) -> bool:
    """Whether counters are those of a fresh program, with other counts: none of them negative."""
    if isinstance(fresh, dict):
        is_same = isinstance(saved, dict) and saved.keys() == fresh.keys()
        return is_same and all(is_like(saved[key], value) for key, value in fresh.items())
    if type(saved) is not type(fresh):
        return False
    return type(saved) is not int or 0 <= saved < LAST_BATCH


def refuse_other_schedule(where: str, saved: Any, fresh: LRScheduler, step: int) -> None:
    """Whether a schedule is that of this run, as it is after so many steps.

    PyTorch would take whatever is in the file, even in the place of methods. The rates it had last
    are not compared: :func:`follow_schedule` puts those of this run in their place.

    Args:
        where: what errors begin with.
        saved: its state, plain values.
        fresh: the schedule as this run's configuration makes it.
        step: the step the checkpoint is of.

    Raises:
        CheckpointError: naming what does not fit.
    """
    wanted = fresh.state_dict() | {"last_epoch": step, "_step_count": step + 1}
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where}: its learning-rate schedule is none")
    if differing := wanted.keys() ^ saved.keys():
        raise CheckpointError(
            f"{where}: its learning-rate schedule is not that of this program "
            f"({min(differing):.60} is missing or unknown)"
        )
    for key in wanted.keys() - {RATES}:
        if type(saved[key]) is not type(wanted[key]) or saved[key] != wanted[key]:
            raise CheckpointError(f"{where}: its learning-rate schedule has another {key}")


def follow_schedule(optimizer: Optimizer, schedule: LRScheduler) -> None:
    """Go on with the rates of this run's schedule, not with those that a checkpoint was left with.

    They are the same, bit for bit, unless the run was asked for more steps: the end of the shorter
    schedule, which is a rate of zero, would be that of its next step.

    Args:
        optimizer: of the run, restored.
        schedule: its schedule, restored.
    """
    assert isinstance(schedule, LambdaLR)
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def refuse_other_state(trainer: L.Trainer, fresh: Optimizer, step: int) -> None:
    """Whether what was restored is a state this run can have been in.

    PyTorch checks the number of parameters only: moments of another shape would be read beyond
    their end, and the file's learning rates would silently replace the configuration's.

    Args:
        trainer: the trainer, its state restored.
        fresh: the optimiser as this run's configuration makes it.
        step: the step the checkpoint is of.

    Raises:
        CheckpointError: naming what does not fit.
    """
    where = f"{trainer.ckpt_path}"
    (restored,) = trainer.optimizers
    for group, wanted in zip(restored.param_groups, fresh.param_groups, strict=True):
        if group.get("initial_lr") != wanted["lr"]:
            raise CheckpointError(f"{where}: its optimiser has another learning rate")
    for part, new in zip(parts_of(restored), parts_of(fresh), strict=True):
        for group, wanted in zip(part.param_groups, new.param_groups, strict=True):
            for key in wanted.keys() - {"params", "lr"}:
                if group.get(key) != wanted[key]:
                    raise CheckpointError(f"{where}: its optimiser has another {key}")
            for parameter in group["params"] if step else ():
                refuse_other_memory(where, part, parameter)


def refuse_other_memory(where: str, optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Whether an optimiser remembers what it should about a parameter.

    Raises:
        CheckpointError: it does not.
    """
    memory = optimizer.state.get(parameter, {})
    shapes = {key: () if key == "step" else parameter.shape for key in memory}
    if memory.keys() != MEMORY_OF[type(optimizer).__name__] or any(
        not isinstance(value, torch.Tensor) or value.shape != shapes[key]
        for key, value in memory.items()
    ):
        raise CheckpointError(f"{where}: its optimiser's state does not fit the weights")


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimisers that one is made of: itself, unless it says otherwise."""
    return getattr(optimizer, "parts", [optimizer])
