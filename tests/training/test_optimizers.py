"""Optimisers and schedule."""

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
from tests.support.builders import contractive_model

OPTIONS = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.0}


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
