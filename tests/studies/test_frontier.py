import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.nn.functional import cross_entropy

from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.config.schema import AttentionName, ModelConfig, OptimConfig, TrainConfig
from invformer.data.windows import TrainingWindows
from invformer.training.optimizers import build_optimizer, warmup_cosine
from invformer.weights.spectral import refresh_normalisers, set_manual_refresh
from studies import frontier
from studies.frontier import (
    Case,
    Options,
    Result,
    best_rates,
    cases,
    draw,
    measure,
    summarise,
    train,
)  # fmt: skip
from studies.training import GRAD_CLIP

CPU = torch.device("cpu")
TINY = [
    "d_model=12", "num_heads=2", "num_layers=1", "seq_len=16", "batch_size=4", "num_steps=6",
    "num_windows=2", "data.max_characters=12000", "optimisers=[adamw]",
    "lipschitz_targets=[0.8]",
]  # fmt: skip
# The grid of docs/results.md, which is more than the default trains.
EVERYTHING = [
    "certificates=[token_max, causal]", "strictly_causal=[false, true]",
    "diagonal_scaling=[false, true]",
]  # fmt: skip
BASELINE = Result(1.7, 100, nats=2.0, estimate=3.0)
CERTIFIED = Result(1.7, 100, nats=2.1, estimate=0.5, certified=0.8)
LOST = Result(1.7, 100)


def grid(*words: str) -> list[Case]:
    return cases(load_config([*TINY, *EVERYTHING, *words], Options))


def only(*words: str) -> Case:
    (case,) = grid(
        "certificates=[token_max]", "strictly_causal=[false]", "diagonal_scaling=[false]", *words
    )
    return case


def test_the_default_is_a_figure_of_twelve_trainings_and_the_record_one_of_114() -> None:
    chosen = cases(Options())
    assert len(chosen) == 12
    assert {c.optimiser for c in chosen} == {"adamw", "muon"}
    assert {c.lipschitz_target for c in chosen} == {None, 0.5, 0.97}
    assert {c.model for c in chosen} == set(get_args(AttentionName)) - {"reversible"}
    assert set(chosen) <= set(cases(load_config(EVERYTHING, Options)))
    words = ["lipschitz_targets=[0.5, 0.7, 0.97]", "muon_lr=[0.01, 0.02]"]
    record = cases(load_config([*EVERYTHING, *words], Options))
    assert len(record) == 114
    assert {c.model for c in record if c.strictly_causal} == {"contractive_bounded"}
    plain = {(c.certificate, c.lipschitz_target) for c in record if c.model == "l2"}
    assert plain == {(None, None)}


def test_the_recipe_is_that_of_the_trainer() -> None:
    trainer = TrainConfig(optim=OptimConfig())
    assert trainer.optim.grad_clip == GRAD_CLIP


@pytest.mark.parametrize(
    ("model", "optimiser"),
    [("contractive_l2", "adamw"), *((name, "muon") for name in get_args(AttentionName))],
)
def test_training_is_the_plain_loop_step_by_step(model: AttentionName, optimiser: str) -> None:
    case = only(f"models=[{model}]", f"optimisers=[{optimiser}]")
    text = case.text
    torch.manual_seed(case.seed)
    config = ModelConfig(
        name=model, certificate=case.certificate, d_model=12, num_heads=2, num_layers=1,
        lipschitz_target=0.8, activation_norm=True, diagonal_scaling=False,
    )  # fmt: skip
    plain = build_model(config, text.vocab_size, 16).float()
    set_manual_refresh(plain)
    how = OptimConfig(name=optimiser, lr=8e-3, muon_lr=2e-2, weight_decay=0.0)
    descent = build_optimizer(plain, how)
    schedule = warmup_cosine(descent, 1, 6)
    for step in range(6):
        inputs, targets = TrainingWindows(text.train, 16, 4, case.seed).batch(step)
        if step == 0:
            plain.initialise(inputs)
        descent.zero_grad()
        cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        descent.step()
        schedule.step()
        refresh_normalisers(plain)
    trained, how = train(case, CPU)
    assert len(how) == 6
    weights = dict(plain.named_parameters())
    assert all(weights[name].equal(weight) for name, weight in trained.named_parameters())


@pytest.mark.parametrize("model", get_args(AttentionName))
def test_the_numbers_of_a_row_are_those_of_an_independent_computation(model: AttentionName) -> None:
    case = only(f"models=[{model}]")
    result = measure(case, CPU)
    trained, _ = train(case, CPU)
    text = case.text
    trained.eval()
    total = math.log(text.vocab_size)  # the first character, which nothing predicts
    with torch.no_grad():
        for start in range(0, len(text.val) - 1, 16):
            window = text.val[start : start + 17].long()
            logits = trained(window[:-1][None])[0].double()
            total -= logits.log_softmax(-1).gather(1, window[1:, None]).sum().item()
    assert result.nats == pytest.approx(total / len(text.val), rel=1e-6)
    assert result.bpc == pytest.approx(result.nats / math.log(2))
    assert result.num_characters == len(text.val)
    branches = dict(trained.stack.branches()) if trained.is_invertible else {}
    if not branches:
        assert result.certified is None
        return
    bounds = [branch.lipschitz_bound("token_max", torch.float32) for branch in branches.values()]
    assert result.certified == max(bounds) <= 0.8
    assert result.estimate <= result.certified


def test_a_causal_certificate_bounds_diagonal_blocks() -> None:
    (case,) = grid("models=[contractive_l2]", "certificates=[causal]", "diagonal_scaling=[false]")
    result = measure(case, CPU)
    assert result.certified is not None
    assert result.certified <= 0.8


def rows_of(*pairs: tuple[str, Result]) -> list[tuple[Case, Result]]:
    return [(only(*words.split()), result) for words, result in pairs]


def test_the_best_learning_rate_counts_and_the_gap_is_to_the_best_baseline() -> None:
    free, bound = "models=[dot_product]", "models=[contractive_bounded]"
    rows = rows_of(
        (free, replace(BASELINE, nats=2.0)),
        (f"{bound} optimisers=[muon] muon_lr=[0.01]", replace(CERTIFIED, nats=2.3)),
        (f"{bound} optimisers=[muon] muon_lr=[0.1]", replace(CERTIFIED, nats=2.4)),
        (f"{bound} optimisers=[muon] muon_lr=[0.2]", LOST),
    )
    baseline, certified = best_rates(rows)
    assert (baseline[1].nats, certified[0].muon_lr, certified[1].nats) == (2.0, 0.01, 2.3)
    summary = summarise(rows)
    assert "gap +0.300 nats, +0.433 bpc" in str(summary)
    assert [line["gap, nats"] for line in summary.table] == pytest.approx([0.0, 0.3])


def test_a_training_that_fails_is_a_row_and_never_the_best() -> None:
    rows = rows_of(
        ("models=[contractive_l2]", LOST),
        ("models=[contractive_bounded]", CERTIFIED),
        ("models=[dot_product]", LOST),
    )
    summary = summarise(rows)
    assert [line["nats"] for line in summary.table] == [math.inf, 2.1, math.inf]
    assert "2 of the best" in str(summary)
    assert "best certified 2.100 nats" in str(summary)
    assert "best unconstrained" not in str(summary)
    assert draw(rows).axes


def test_a_training_that_loses_its_numbers_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [3.0, math.nan]
    monkeypatch.setattr(frontier, "train_by_recipe", lambda model, case: lost)
    assert measure(only("models=[dot_product]"), CPU).nats == math.inf
