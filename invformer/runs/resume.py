"""What must be the same for a run to continue: its text and configuration, and a state of its own.

PyTorch and Lightning restore what a file happens to hold: a missing moment, schedule or generator
is passed over silently, a learning rate of the file replaces the configuration's. So a state is
compared with the one that this program would have at that step.
"""

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
MEMORY_OF = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}
RATES = {"lr", "_last_lr"}  # of now; they depend on how many steps are asked for by now
MOST = 1 << 48  # that a counter reaches
DATA = "TextDataModule"  # Lightning's key for the sampler's position

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
        return None
    for reason in refused:
        log.warning("%s; continuing from %s", reason, newest.path.name)
    require_same_run(newest, metadata)
    return newest


def is_complete(checkpoint: Checkpoint | None, max_steps: int) -> bool:
    """Whether all steps of a run are done, and no validation has to be made up for."""
    if checkpoint is None or checkpoint.step < max_steps:
        return False
    try:
        return checkpoint.read_state()["callbacks"]["Interruption"]["validating"] is False
    except (KeyError, TypeError):  # not a state of this program, which is refused when it is loaded
        return False


def require_same_run(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> None:
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
            f"{saved['data_sha256'][:12]}…; restore the text or choose another run.name"
        )
    if saved["vocabulary"] != metadata["vocabulary"]:
        raise CheckpointError(f"{checkpoint.path}: its vocabulary is not that of the run's text")


def require_own_state(
    trainer: L.Trainer, saved: Mapping[str, Any], fresh: Optimizer, schedule: LRScheduler
) -> None:
    """Compare a state with the one that this program has after as many steps.

    Counters, tensors and rates change as a run goes on: of them the kind, the number and the shape
    must be the same. Hyper-parameters must be equal. Callbacks check their own memory.

    Args:
        trainer: about to restore its state.
        saved: the checkpoint as Lightning holds it.
        fresh: the optimiser as the configuration makes it.
        schedule: of ``fresh``.

    Raises:
        CheckpointError: naming what differs.
    """
    step = saved["global_step"]
    batches = step * trainer.accumulate_grad_batches
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    names = {c.state_key for c in callbacks if type(c).state_dict is not L.Callback.state_dict}
    position = trainer.datamodule.state_dict()  # type: ignore[attr-defined]
    loop, saved_loop = trainer.fit_loop.state_dict(), saved["loops"].get("fit_loop")
    wanted_schedule = schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1}
    differing = (
        first_difference(sorted(saved["callbacks"]), sorted(names), "callbacks")
        or first_difference(saved_loop, loop, "loops", counting=True)
        or first_difference(saved[DATA], position, "position", counting=True)
        or first_difference(saved["optimizer_states"], [with_memory(fresh, step)], "optimiser")
        or first_difference(saved["lr_schedulers"], [wanted_schedule], "schedule")
    )
    if not differing:
        steps = saved_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        counted = saved_loop["epoch_loop.batch_progress"]
        at = (
            steps["total"]["completed"], saved[DATA]["global_step"],
            counted["total"]["completed"], counted["current"]["completed"],
        )  # fmt: skip
        differing = "" if at == (step, step, batches, batches) else "the step of its loops"
    if differing:
        raise CheckpointError(f"{trainer.ckpt_path}: not a state of this run ({differing:.80})")


def first_difference(saved: Any, wanted: Any, path: str, *, counting: bool = False) -> str:
    """Where a nested state differs from the wanted one; empty if it does not.

    Tensors need the same shape, and numbers the same value or, if they count, the same type.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(saved, Mapping) or saved.keys() - RATES != wanted.keys() - RATES:
            return path
        parts = [(key, saved[key], wanted[key]) for key in wanted.keys() - RATES]
    elif isinstance(wanted, list | tuple):
        if type(saved) is not type(wanted) or len(saved) != len(wanted):
            return path
        parts = [(key, *pair) for key, pair in enumerate(zip(saved, wanted, strict=True))]
    elif isinstance(wanted, torch.Tensor):
        return "" if isinstance(saved, torch.Tensor) and saved.shape == wanted.shape else path
    elif type(saved) is not type(wanted):
        return path
    elif counting:
        return "" if type(saved) is not int or 0 <= saved < MOST else path
    else:
        return "" if saved == wanted else path
    found = (first_difference(s, w, f"{path}/{key}", counting=counting) for key, s, w in parts)
    return next(filter(None, found), "")


def with_memory(optimizer: Optimizer, step: int) -> dict[str, Any]:
    """The state of a fresh optimiser, with tensors as large as those it has after some steps."""
    state = optimizer.state_dict()
    parts: list[Optimizer] = getattr(optimizer, "parts", [optimizer])
    for part, of_part in zip(parts, state.get("parts", [state]), strict=True):
        parameters = [p for group in part.param_groups for p in group["params"]]
        kept = MEMORY_OF[type(part).__name__]
        of_part["state"] = {
            number: {key: torch.tensor(0) if key == "step" else p for key in kept}
            for number, p in enumerate(parameters if step else ())
        }
    return state


def follow_schedule(optimizer: Optimizer, schedule: LRScheduler) -> None:
    """Go on with the rates of this run's schedule, not with those that a checkpoint was left with.

    They are the same, bit for bit, unless the run was asked for more steps: the shorter schedule
    ended with a rate of zero.
    """
    assert isinstance(schedule, LambdaLR)
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
