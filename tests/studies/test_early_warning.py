"""studies.early_warning: its verdict, its signals, and the constants behind estimates."""

import random
from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

from invformer.lipschitz.probe import certified_in
from studies.early_warning import AT, FREE, Case, Result, Run, points_of, summarise
from studies.monitor_quality import constants
from studies.roc import Labels, threshold
from studies.subjects import WINDOW, spike
from tests.lipschitz.test_probe import MODELS, dense
from tests.support.builders import random_tokens, trained_a_little
from tests.support.problems import diagonal_norm, norm_from_below

CASE = Case(
    corpus="python_docs", path=None, max_characters=None, val_characters=None, val_fraction=0.05,
    test_fraction=0.05, sha256="", seed=0, d_model=8, num_heads=1, num_layers=1, seq_len=8,
    batch_size=1, num_steps=100, lr=1.0, family="l2/adamw", has_warm_up=True, is_clipped=True,
    nanogpt=None,
)  # fmt: skip
POINTS = points_of(100)


def branches_of(series: list[float]) -> dict[str, list[float]]:
    """A block and its branches, all alike."""
    return {f"block_00{part}": series for part in ("", "/attention", "/feed_forward")}


def rows(*, informed: bool, last: int = len(POINTS)) -> list[tuple[Case, Result]]:
    """Twelve families of eight runs, half of them sick; the branch grows in these if informed."""
    draw, found = random.Random(0), []
    for family in range(12):
        for k in range(8):
            free = {name: [draw.uniform(1, 2) for _ in POINTS] for name in FREE}
            grown = 20.0 * 4**family if informed and k >= 4 else draw.uniform(1, 2) * 4**family
            series = [4.0**family, *(grown for _ in POINTS[1:])][:last]
            case = replace(CASE, sha256=str(family), lr=2.0**k)
            result = Result(1 + k % 4 / 100 + (k >= 4), POINTS[:last], free, branches_of(series))
            found.append((case, result))
    return found


def test_an_estimate_that_grows_in_every_sick_run_beats_signals_that_know_nothing() -> None:
    summary = summarise(rows(informed=True))
    assert summary.outcome == "reproduced"
    area = {line["signal"]: line["area 5 %"] for line in summary.table}
    assert area["estimate"] == area["growth"] == 1
    assert all(0.3 < area[signal] < 0.7 for signal in FREE)
    assert "finds 100 % (100 to 100) of the sick runs" in str(summary)


def test_an_estimate_that_knows_nothing_or_no_more_than_the_loss_is_not_praised() -> None:
    assert summarise(rows(informed=False)).outcome == "not reproduced"
    same = [
        (case, replace(r, readings={**r.readings, "loss": r.branches["block_00"]}))
        for case, r in rows(informed=True)
    ]
    assert summarise(same).outcome == "partly reproduced"


def test_a_run_that_ended_looks_worst_to_every_signal() -> None:
    ended = Run(*rows(informed=False, last=1)[0], "", rows(informed=False)[0])
    for signal in (*FREE, "estimate", "growth"):
        assert ended.reading(signal, round(AT[0] * 100)) == float("inf")


def test_areas_and_thresholds_are_those_of_counting() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(6, (40,), generator=generator).double()
    scores[3] = torch.inf
    sick = torch.rand(40, generator=generator) < 0.4
    labels = Labels(sick, torch.arange(40) % 5)
    pairs = [(a, b) for a in scores[sick] for b in scores[~sick]]
    counted = sum(float(a > b) + 0.5 * float(a == b) for a, b in pairs) / len(pairs)
    assert labels.area(scores) == pytest.approx(counted, rel=1e-12)
    assert labels.area(-scores) == pytest.approx(1 - counted, rel=1e-12)
    healthy = torch.arange(100).double()
    assert threshold(healthy) == 94  # 95 to 99 are above
    assert threshold(healthy[:10]) == 9


def test_a_rise_of_twice_the_mean_is_where_lightning_stops_a_training(tmp_path) -> None:
    draw, fabric = random.Random(2), Fabric(accelerator="cpu", devices=1)
    for _ in range(20):
        losses = [draw.uniform(0.5, 1) * draw.choice([1] * 9 + [3]) for _ in range(3 * WINDOW)]
        detection, stopped = SpikeDetection(exclude_batches_path=tmp_path / "a.json"), None
        for i, loss in enumerate(losses):
            try:
                detection.on_train_batch_end(fabric, torch.tensor(loss), None, i)
            except TrainingSpikeException:
                stopped = i
                break
        ours = (i for i in range(len(losses)) if spike(losses[: i + 1]) >= 2)
        assert next(ours, None) == stopped


@pytest.mark.parametrize("name", ["actnorm", "weighted", "dot product"])
def test_constants_are_those_of_dense_jacobians(name: str) -> None:
    model, tokens = trained_a_little(MODELS[name]()), random_tokens(1, seed=3)
    found = constants(model, tokens, num_starts=4)
    for branch, jacobian in dense(model, tokens).items():
        is_alone = certified_in(model) == "diagonal_block" or "feed_forward" in branch
        true = diagonal_norm(jacobian) if is_alone else norm_from_below(jacobian, "token_max")
        assert found[branch] == pytest.approx(true, rel=2e-3)
