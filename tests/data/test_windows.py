"""Every character is used equally in training and predicted exactly once in evaluation."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invformer.data.windows import EvaluationWindows, TrainingWindows


def test_a_training_batch_depends_on_seed_and_step_alone() -> None:
    tokens = torch.arange(1000)
    steps = [TrainingWindows(tokens, 8, 4, seed=1).batch(i)[0] for i in range(50)]
    for i in (49, 0, 23):
        assert torch.equal(TrainingWindows(tokens, 8, 4, seed=1).batch(i)[0], steps[i])
    assert not torch.equal(TrainingWindows(tokens, 8, 4, seed=2).batch(0)[0], steps[0])
    assert len({tuple(s.flatten().tolist()) for s in steps}) == 50


@pytest.mark.parametrize("n", [8, 9, 23, 64])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_in_an_epoch_no_character_is_a_target_twice(n: int, batch_size: int) -> None:
    seq_len = 8
    per_epoch = n // seq_len
    batches = itertools.islice(
        TrainingWindows(torch.arange(n), seq_len, batch_size, seed=0), 40 * per_epoch
    )
    windows = torch.cat([targets for _, targets in batches])[: 40 * per_epoch]
    for epoch in windows.split(per_epoch):
        assert len(epoch.unique()) == per_epoch * seq_len
    assert len(windows.unique()) == n


def test_over_many_epochs_every_character_is_used_equally_often() -> None:
    n, seq_len, epochs = 23, 5, 4000
    tokens = torch.arange(n)
    targets = TrainingWindows(tokens, seq_len, epochs * (n // seq_len), seed=0).batch(0)[1]
    used = targets.flatten().bincount(minlength=n)
    share = (n - n % seq_len) / n
    deviation = (epochs * share * (1 - share)) ** 0.5
    assert (used - epochs * share).abs().max() < 5 * deviation


@pytest.mark.parametrize("n", [9, 40])
def test_a_target_is_the_character_after_its_input_on_the_ring(n: int) -> None:
    tokens = torch.arange(n).to(torch.uint16)  # narrow, as they are in memory
    inputs, targets = TrainingWindows(tokens, 8, 100, seed=0).batch(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % n)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_side_by_side_see_the_batch_of_one_process(world_size: int) -> None:
    tokens = torch.arange(100)
    for step in range(20):
        whole = TrainingWindows(tokens, 8, 6, seed=0).batch(step)
        shares = [
            TrainingWindows(tokens, 8, 6 // world_size, 0, 0, rank, world_size).batch(step)
            for rank in range(world_size)
        ]
        for i in range(2):
            assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


@settings(deadline=None)
@given(st.data())
def test_evaluation_predicts_all_but_the_first_character_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 60))
    seq_len = data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(1, seq_len))
    batch_size = data.draw(st.integers(1, 9))
    world_size = data.draw(st.integers(1, 3))
    scored_positions = []
    lengths = set()
    for rank in range(world_size):
        windows = EvaluationWindows(
            torch.arange(n), seq_len, stride, batch_size, rank=rank, world_size=world_size
        )
        lengths |= {len(windows), len(list(windows))}
        for inputs, targets, scored in windows:
            assert len(inputs) <= batch_size
            rows, columns = scored.nonzero(as_tuple=True)
            target = targets[scored]
            scored_positions += target.tolist()
            assert torch.equal(inputs[scored], target - 1)
            # What a character is predicted from: as much of the text as the stride promises.
            assert torch.equal(inputs[rows, 0], target - 1 - columns)
            assert (columns + 1 >= target.clamp(max=seq_len - stride + 1)).all()
    assert sorted(scored_positions) == list(range(1, n))
    assert len(lengths) == 1  # the same number of batches for every process
