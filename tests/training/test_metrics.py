"""Bits per character: the definition, its precision, its merging."""

import math

import pytest
import torch

from invformer.training.metrics import BitsPerChar


def test_a_uniform_model_costs_log2_of_the_alphabet() -> None:
    metric = BitsPerChar()
    metric.update(torch.full((50,), math.log(8)), 50)
    assert metric.compute().item() == pytest.approx(3, rel=1e-15)


def test_the_mean_is_not_rounded_to_the_default_type() -> None:
    torch.set_default_dtype(torch.float32)
    metric = BitsPerChar()
    metric.update(torch.tensor(1234.5, dtype=torch.float64), 701)
    assert metric.compute().item() == pytest.approx(1234.5 / 701 / math.log(2), rel=1e-15)


def test_batches_of_different_sizes_weigh_by_their_characters() -> None:
    metric = BitsPerChar()
    metric.update(torch.tensor(10.0), 10)
    metric.update(torch.tensor(90.0), 30)
    assert metric.compute().item() == pytest.approx(100 / 40 / math.log(2), rel=1e-15)


def test_a_long_text_does_not_drift() -> None:
    metric = BitsPerChar()
    for _ in range(5000):
        metric.update(torch.tensor(333.3, dtype=torch.float32), 256)
    exact = 5000 * torch.tensor(333.3, dtype=torch.float32).double() / (5000 * 256 * math.log(2))
    assert metric.compute().item() == pytest.approx(exact.item(), rel=1e-13)


def test_states_of_two_processes_add_up() -> None:
    one, other, both = BitsPerChar(), BitsPerChar(), BitsPerChar()
    for metric, nats, count in ((one, 5.0, 4), (other, 7.0, 6), (both, 12.0, 10)):
        metric.update(torch.tensor(nats), count)
    merged = (one.nats + other.nats) / ((one.characters + other.characters) * math.log(2))
    assert merged.item() == both.compute().item()
