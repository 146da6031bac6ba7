"""Optimisers and schedule."""

import copy
from itertools import pairwise

import pytest
import torch

from invformer.config.schema import OptimConfig
from invformer.training.optimizers import (
    build_optimizer,
    learning_rates,
    split_matrices,
    warmup_cosine,
)
from tests.nn.builders import contractive_model, train

OPTIONS = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.0}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimiser_continues_to_the_same_bits(name: str) -> None:
    model = contractive_model()
    optimiser = build_optimizer(model, OptimConfig(name=name, **OPTIONS))
    train(model, optimiser, range(3))
    other = contractive_model()
    other.load_state_dict(model.state_dict())
    restored = build_optimizer(other, OptimConfig(name=name, **OPTIONS))
    restored.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    train(model, optimiser, range(3, 6))
    train(other, restored, range(3, 6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_muon_gets_the_matrices_of_the_stack_and_adamw_the_rest() -> None:
    model = contractive_model()
    names = {id(p): n for n, p in model.named_parameters()}
    matrices, others = split_matrices(model)
    assert all("weight" in names[id(p)] and "stack" in names[id(p)] for p in matrices)
    assert len(matrices) + len(others) == len(list(model.parameters()))
    assert any("embedding" in names[id(p)] for p in others)


def test_every_rate_is_logged_as_the_schedule_moves_it() -> None:
    for name, keys in (("adamw", {"optim/lr"}), ("muon", {"optim/lr", "optim/muon_lr"})):
        optimiser = build_optimizer(contractive_model(), OptimConfig(name=name, **OPTIONS))
        warmup_cosine(optimiser, warmup_steps=2, max_steps=4)
        rates = learning_rates(optimiser)
        assert rates == {key: OPTIONS[key.removeprefix("optim/")] / 2 for key in keys}


def test_the_schedule_warms_up_linearly_and_ends_at_its_floor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = warmup_cosine(optimiser, warmup_steps=4, max_steps=20, min_fraction=0.1)
    rates = []
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))
