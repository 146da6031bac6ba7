"""An update that is not finite never happens, and what caused it is named."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from invformer.config.schema import OptimConfig
from invformer.errors import NonFiniteError
from invformer.training.fit import Run, fit
from invformer.training.guard import UpdateGuard
from invformer.training.module import CharLanguageModel
from invformer.training.optimizers import build_optimizer
from tests.support.small_runs import CONTRACTIVE, DROPOUT, built, newest, options

BAD_STEP, LAST_SAVED = 6, 5
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("single_precision")


def state_of(run: Run) -> dict[str, object]:
    """A copy of weights and optimiser."""
    optimizer = run.trainer.optimizers[0].state_dict()
    return copy.deepcopy({"weights": run.module.model.state_dict(), "optimizer": optimizer})


def require_same(one: object, other: object) -> None:
    """Nested states must be equal bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def break_gradient(run: Run, value: float) -> None:
    """Spoil one number of the head's gradient in the bad step."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if run.trainer.global_step == BAD_STEP:
            gradient.view(-1)[0] = value
        return gradient

    run.module.model.head.weight.register_hook(spoil)


def watch(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The state before the bad step, filled in when it begins."""
    before: dict[str, object] = {}
    step = CharLanguageModel.training_step

    def watched(module: CharLanguageModel, *arguments: object) -> Tensor:
        if module.trainer.global_step == BAD_STEP and not before:
            before.update(state_of(run))
        return step(module, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CharLanguageModel, "training_step", watched)
    return before


def run_of(folder: Path, *more: str) -> Run:
    return built(options(folder, "a", *more, model=()))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "more",
    [CONTRACTIVE, DROPOUT, (*CONTRACTIVE, "optim=muon"), (*CONTRACTIVE, "trainer.accumulate=2")],
    ids=["contractive", "dot_product", "muon", "accumulate"],
)
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(
    folder, monkeypatch, more: tuple[str, ...], value: float
) -> None:
    run = run_of(folder, *more, "monitor.enabled=false")
    break_gradient(run, value)
    before = watch(run, monkeypatch)
    each = 16 if "trainer.accumulate=2" in more else 8
    place = f"in windows {BAD_STEP * each}–{(BAD_STEP + 1) * each - 1}; "
    cause = rf"step {BAD_STEP}: the gradient of head\.weight is not finite"
    with pytest.raises(NonFiniteError, match=f"^{cause}.*{place}"):
        fit(run)
    assert before
    require_same(before, state_of(run))
    assert newest(run.directory.path).step == LAST_SAVED


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_waiting_for_the_device_an_update_is_skipped_and_refused_later(
    folder, monkeypatch, optimizer: str
) -> None:
    monkeypatch.setattr(CharLanguageModel, "refuses_at_once", lambda _: False)
    run = run_of(folder, *CONTRACTIVE, f"optim={optimizer}", "monitor.enabled=false")
    break_gradient(run, NAN)
    before = watch(run, monkeypatch)
    with pytest.raises(NonFiniteError, match=rf"step {BAD_STEP}: the gradient of head\.weight"):
        fit(run)
    after = state_of(run)
    assert run.trainer.global_step > BAD_STEP + 1
    require_same(before["weights"], after["weights"])
    assert newest(run.directory.path).step == LAST_SAVED


def test_the_skipping_itself_changes_no_bit(folder, monkeypatch) -> None:
    weights = []
    for name in ("at-once", "later"):
        run = run_of(folder, *CONTRACTIVE, "optim=muon", "trainer.max_steps=10", f"run.name={name}")
        fit(run)
        weights.append(run.module.model.state_dict())
        monkeypatch.setattr(CharLanguageModel, "refuses_at_once", lambda _: False)
    require_same(*weights)


def test_a_loss_that_is_not_finite_is_caught_in_any_batch(folder, monkeypatch) -> None:
    run = run_of(folder, *DROPOUT, "trainer.accumulate=2", "monitor.enabled=false")
    before = watch(run, monkeypatch)
    step = CharLanguageModel.training_step

    def spoiled(module: CharLanguageModel, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = step(module, batch, number)
        if number == 2 * BAD_STEP:  # the first of the two; its gradient stays finite
            module._losses[-1] = loss.detach() + math.inf
        return loss

    monkeypatch.setattr(CharLanguageModel, "training_step", spoiled)
    with pytest.raises(NonFiniteError, match=rf"step {BAD_STEP}: the loss \(inf\) is not finite"):
        fit(run)
    require_same(before, state_of(run))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimiser_leaves_everything_as_it_is_while_the_guard_says_so(name: str) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.1, muon_lr=0.1))

    def step(gradient: float, skip: float | None) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.found_inf = None if skip is None else torch.tensor(skip)  # type: ignore[attr-defined]
        optimizer.step()

    weights = copy.deepcopy(model.state_dict())
    step(NAN, 1.0)  # the first one, which makes the memory
    require_same(weights, dict(model.state_dict()))
    states = optimizer.state.values()
    assert all(t.isfinite().all() for state in states for t in state.values())
    step(0.5, None)
    weights, memory = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(NAN, 1.0)
    require_same(weights, dict(model.state_dict()))
    require_same(memory, optimizer.state_dict())
    step(0.25, 0.0)
    guarded = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(memory)
    step(0.25, None)
    require_same(guarded, model.state_dict())


def test_an_update_of_the_head_alone_may_be_skipped() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    model["head"].weight.grad = torch.ones(3, 4)
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert model["a"].weight not in optimizer.state


def inspect(guard: UpdateGuard, step: int, loss: float, *gradients: float) -> Tensor:
    parameters = {f"weight_{i}": torch.full((2,), g) for i, g in enumerate(gradients)}
    return guard.inspect(step, torch.tensor(loss), parameters)


def test_the_guard_remembers_the_first_culprit_only_which_may_be_the_norm() -> None:
    guard = UpdateGuard()
    assert guard.culprit() is None
    inspect(guard, 3, 1.0, 0.5, 0.5)
    assert guard.culprit() is None
    inspect(guard, 4, 1.0, 0.5, NAN)
    inspect(guard, 5, NAN, NAN, 0.5)
    inspect(guard, 6, 1.0, 0.5, 0.5)
    assert guard.culprit() == (4, "the gradient of weight_1 is not finite")
    assert guard.lost is not None
    assert guard.lost.item() == 1

    guard = UpdateGuard()  # a norm that overflows is not finite either
    guard.inspect(0, torch.tensor(1.0), {str(i): torch.full((1,), 3e38) for i in range(4)})
    assert guard.culprit() == (0, "the norm of all gradients together is not finite")


def test_the_guards_norm_is_that_of_clipping_to_the_last_bit() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (5, 17, 1)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = {str(i): p.grad.clone() for i, p in enumerate(parameters) if p.grad is not None}
    norm = UpdateGuard().inspect(0, torch.tensor(1.0), gradients)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True))


def test_skipped_updates_are_never_saved(folder) -> None:
    run = run_of(folder, *DROPOUT)
    refuse: Callable[[dict], None] = run.module.on_save_checkpoint
    inspect(run.module.guard, 4, NAN, *(0.5 for _ in run.module.model.parameters()))
    run.module.trainer = run.trainer
    run.trainer.datamodule = run.data
    run.data.trainer = run.trainer
    with pytest.raises(NonFiniteError, match="step 4: the loss"):
        refuse({})
    run.trainer.datamodule = L.LightningDataModule()  # a user's own, which names no windows
    with pytest.raises(NonFiniteError, match=r"the loss \(nan\) is not finite; the update was not"):
        refuse({})
