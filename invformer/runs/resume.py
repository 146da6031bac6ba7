"""What must be the same for a run to continue: its text and configuration, and a state of its own.

PyTorch and Lightning restore what a file happens to hold: a missing moment, schedule or generator
is passed over silently, a learning rate of the file replaces the configuration's. So a state is
compared with the one that this program would have at that step.
"""

import logging
import math
import shlex
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from invformer.config.schema import TrainConfig, TrainerConfig
from invformer.config.section import options
from invformer.errors import CheckpointError, DataError
from invformer.runs.checkpoint import CHANGES, Checkpoint, newest_checkpoint
from invformer.runs.run_directory import (
    RunDirectory,
    is_begun,
    is_first_process,
    saved_configuration,
)

# These may differ between a run and its continuation, since they change no trained number. Another
# path has to lead to the same text, which is checked apart.
MAY_CHANGE = (
    "data.path", "data.split", "data.unknown", "logger.", "monitor.", "run.change", "run.debug",
    "run.name", "run.resume", "run.root", "trainer.eval_batch_size", "trainer.max_steps",
    "trainer.max_time", "trainer.patience", "trainer.progress", "trainer.rank_timeout",
    "trainer.sample_length",
)  # fmt: skip
# These change the rounding (validations shrink weights that exceed a target by rounding).
NOT_BIT_FOR_BIT = (
    "model.attention_kernel", "trainer.accelerator", "trainer.checkpoint_activations",
    "trainer.compile", "trainer.cuda_graph", "trainer.deterministic", "trainer.devices",
    "trainer.num_threads", "trainer.val_every",
)  # fmt: skip
ON_REQUEST = {  # with run.change=true
    "data.batch_size", "model.dropout", "model.head_dropout", "optim.betas", "optim.ema_decay",
    "optim.grad_clip", "optim.lr", "optim.min_lr_fraction", "optim.muon_lr", "optim.warmup_steps",
    "optim.weight_decay", "trainer.accumulate",
}  # fmt: skip
OF_MODEL = ("model.", "data.seq_len", "data.vocabulary", "init_from")
MONITORS = {"Alarm", "LipschitzMonitor"}  # Lightning's keys of what may begin anew
# The tensors kept for each parameter, all of which have gradients.
MEMORY_OF_ADAMW, MEMORY_OF_MUON = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)
RATES = {"lr", "_last_lr"}  # of now; they depend on how many steps are asked for by now

log = logging.getLogger(__name__)


def resume_point(
    run: RunDirectory, config: TrainConfig, metadata: dict[str, Any]
) -> Checkpoint | None:
    """The checkpoint a run continues from: the newest whole one; None if there is none.

    Damaged ones are passed over with a warning. ``config`` and ``metadata`` are those that the run
    shall continue with; settings that were changed on request are added to the metadata.

    Raises:
        CheckpointError: none verifies, or the run has another configuration or vocabulary.
        DataError: the text is not what the run was started with.
    """
    newest, refused = newest_checkpoint(run.checkpoints)
    if newest is None and not is_begun(run.path):
        return None
    before = saved_configuration(run.path) if newest is None else newest.configuration()
    differing = differing_values(before, config)
    require_changeable(run, config, differing, newest)
    if newest is None:
        return None
    for reason in refused:
        log.warning("%s; continuing from %s", reason, newest.path.name)
    saved, asked = newest.metadata, config.trainer.max_steps
    if newest.step > asked:
        raise CheckpointError(
            f"{newest.path}: the run is at step {newest.step}, past trainer.max_steps={asked}: ask "
            "for more steps, or choose another run.name"
        )
    if saved["data_sha256"] != metadata["data_sha256"]:
        raise DataError(
            f"the text changed since the run began: {metadata['data_source']} has SHA-256 "
            f"{metadata['data_sha256'][:12]}…, {newest.path} was trained on "
            f"{saved['data_sha256'][:12]}…; restore the text, or {new_run_from(run)}"
        )
    if saved["vocabulary"] != metadata["vocabulary"]:
        raise CheckpointError(f"{newest.path}: its vocabulary is not that of the run's text")
    changes = saved.get(CHANGES, [])
    if requested := {key: pair for key, pair in differing.items() if key in ON_REQUEST}:
        changes = [*changes, {"step": newest.step, "from_to": requested}]
    if changes:
        metadata[CHANGES] = changes
    rounded = {key: pair for key, pair in differing.items() if key.startswith(NOT_BIT_FOR_BIT)}
    if is_first_process() and requested:
        log.warning(
            "%s: from step %d on %s; this run is no longer the one of its first command",
            run.path, newest.step, in_words(requested),
        )  # fmt: skip
    if is_first_process() and rounded:
        log.warning("%s: %s; it continues, not bit for bit", run.path, in_words(rounded))
    return newest


def differing_values(before: TrainConfig, now: TrainConfig) -> dict[str, list[Any]]:
    """The old and the new value of every setting that changes a trained number, by its key."""
    values = {k: [attrgetter(k)(c) for c in (before, now)] for k, _ in options(TrainConfig)}
    return {
        key: [old, new]
        for key, (old, new) in values.items()
        if old != new and not key.startswith(MAY_CHANGE)
    }


def require_changeable(
    run: RunDirectory,
    config: TrainConfig,
    differing: Mapping[str, list[Any]],
    newest: Checkpoint | None,
) -> None:
    """Raise CheckpointError, which says what is possible, if a run may not go on with a setting."""
    unequal = {k: pair for k, pair in differing.items() if not k.startswith(NOT_BIT_FOR_BIT)}
    new_memory = {k for k, pair in unequal.items() if k == "optim.ema_decay" and None in pair}
    can_change = newest is not None and unequal.keys() <= ON_REQUEST - new_memory
    if not unequal or (can_change and config.run.change):
        return
    if newest is None:
        way = "choose another run.name"
    elif can_change:
        way = "add run.change=true to go on with the new ones"
    elif any(key.startswith(OF_MODEL) for key in unequal):
        way = "choose another run.name (init_from= would bring the model it has)"
    else:
        way = new_run_from(run)
    raise CheckpointError(
        f"{run.path} was started with another configuration ({in_words(unequal)}): repeat the old "
        f"values to continue it, or {way}"
    )


def in_words(differing: Mapping[str, list[Any]]) -> str:
    """Settings with their old and new values."""
    pairs = differing.items()
    return "; ".join(f"{key} was {old!r:.60}, now {new!r:.60}" for key, (old, new) in pairs)


def new_run_from(run: RunDirectory) -> str:
    """How to train on from a run's weights with other settings."""
    start = shlex.quote(f"init_from={run.path}")
    return f"start a new run from its weights: run.name=NEW {start}, without options of the model"


def is_complete(checkpoint: Checkpoint | None, options: TrainerConfig) -> bool:
    """Whether a run has come to its end, by steps or patience, and no validation is missing."""
    if checkpoint is None:
        return False
    try:
        callbacks = checkpoint.read_state()["callbacks"]
        num_worse = callbacks["Checkpoints"].get("num_worse", 0)
        patience = num_worse + 1 if options.patience is None else options.patience
        is_whole = callbacks["Interruption"]["validating"] is False
        return is_whole and (checkpoint.step >= options.max_steps or num_worse >= patience)
    except (KeyError, TypeError):  # not a state of this program, which is refused when it is loaded
        return False


def require_own_state(
    trainer: L.Trainer, saved: Mapping[str, Any], fresh: Optimizer, schedule: LRScheduler
) -> None:
    """Raise CheckpointError if a state is not as this program's own after as many steps.

    Callbacks check their own memory. ``saved`` is the checkpoint as Lightning holds it; the
    optimiser and its schedule are those that the configuration makes.
    """
    step = saved["global_step"]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    own = {c.state_key for c in callbacks if type(c).state_dict is not L.Callback.state_dict}
    names = [sorted({*states} - MONITORS) for states in (saved["callbacks"], own)]
    at_step = schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1}
    parts = {
        "callbacks": tuple(names),
        "optimiser": (outline(saved["optimizer_states"]), outline([with_memory(fresh, step)])),
        "schedule": (outline(saved["lr_schedulers"]), outline([at_step])),
    }
    for name, (there, here) in parts.items():
        if there != here:
            raise CheckpointError(name)


def outline(tree: Any) -> Any:
    """What a nested state keeps as a run goes on: all but rates and tensors' values."""
    match tree:
        case Mapping():
            return {key: outline(item) for key, item in tree.items() if key not in RATES}
        case list() | tuple():
            return [outline(item) for item in tree]
        case torch.Tensor():
            return tree.shape
    return tree


def with_memory(optimizer: Optimizer, step: int) -> dict[str, Any]:
    """The state of a fresh optimiser, with tensors as large as those it has after some steps."""
    state = optimizer.state_dict()
    kept = [
        (p, MEMORY_OF_MUON if "momentum" in group else MEMORY_OF_ADAMW)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    state["state"] = {
        number: {key: torch.tensor(0) if key == "step" else p for key in keys}
        for number, (p, keys) in enumerate(kept if step else ())
    }
    return state


def take_settings(saved: Mapping[str, Any], fresh: Optimizer, schedule: LRScheduler) -> None:
    """Replace peak rates and decays of a saved state by those of this program's own optimiser."""
    own = fresh.state_dict()["param_groups"]
    for there, here in zip(saved["optimizer_states"][0]["param_groups"], own, strict=True):
        there |= {key: value for key, value in here.items() if key not in ("params", "lr")}
    saved["lr_schedulers"][0]["base_lrs"] = schedule.base_lrs


def follow_schedule(optimizer: Optimizer, schedule: LRScheduler) -> list[str]:
    """Go on with the rates of this run's schedule, not with those that a checkpoint was left with.

    They are the same, bit for bit, unless the run was asked for more steps (the shorter schedule
    ended with a rate of zero) or for other rates. Returns, in words, those that differ.
    """
    assert isinstance(schedule, LambdaLR)
    groups, moved = optimizer.param_groups, {}
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        old, group["lr"] = group["lr"], base * factor(schedule.last_epoch)
        name = "optim.muon_lr" if "momentum" in group else "optim.lr"
        if not math.isclose(old, group["lr"]):
            moved[name] = f"{name} goes from {old:.2e} to {group['lr']:.2e}"
    return list(moved.values())
