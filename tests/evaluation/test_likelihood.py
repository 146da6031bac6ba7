"""Bits per character as a metric, and the n-gram beside it."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from invformer import BitsPerCharacter
from invformer.evaluation import ngram
from invformer.evaluation.ngram import witten_bell_nats


def code_lengths(batches: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    nats = torch.rand(batches, generator=generator, dtype=torch.float64) * 500
    return [(x, 100 + i % 3) for i, x in enumerate(nats)]


def exact(given: list[tuple[Tensor, int]]) -> float:
    """The quotient of exact sums."""
    nats = sum(Fraction(x.item()) for x, _ in given)
    return float(nats / sum(count for _, count in given)) / math.log(2)


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float64])
def test_many_batches_are_summed_without_drift(cast: torch.dtype | None) -> None:
    given, metric = code_lengths(3000), BitsPerCharacter().to(cast)
    for _ in range(2):
        metric.reset()
        for nats, count in given:
            metric.update(nats, count)
        assert metric.compute().item() == pytest.approx(exact(given), rel=1e-13)
        assert metric.count == sum(count for _, count in given)


def test_processes_are_added_up_and_go_on_from_their_own_sums() -> None:
    given = code_lengths(9)
    other = BitsPerCharacter()
    for part in given[5:]:
        other.update(*part)
    states = {torch.float64: other.nats, torch.int64: other.count}
    metric = BitsPerCharacter(
        distributed_available_fn=lambda: True, dist_sync_fn=lambda x, group: [x, states[x.dtype]]
    )
    for part in given[:5]:
        metric.update(*part)
    assert metric.compute().item() == pytest.approx(exact(given), rel=1e-15)
    assert metric.count == sum(count for _, count in given[:5])


VOCAB = 5


def random_text(n: int, seed: int) -> Tensor:
    """Skewed, so that contexts repeat."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, generator=generator).square() * (VOCAB - 1)).to(torch.uint8)


def naive_probability(train: list[int], context: list[int], x: int) -> float:
    """The recursion of the docstring, counting anew at every call."""
    lower = naive_probability(train, context[1:], x) if context else 1 / VOCAB
    k = len(context)
    grams = Counter(tuple(train[i : i + k + 1]) for i in range(len(train) - k))
    followers = {g[-1]: count for g, count in grams.items() if g[:-1] == tuple(context)}
    if not followers:
        return lower
    count = sum(followers.values())
    return (followers.get(x, 0) + len(followers) * lower) / (count + len(followers))


@pytest.mark.parametrize("chunk", [2, 7, 1000])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_n_gram_agrees_with_its_definition(order: int, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(ngram, "CHUNK", chunk)
    train, text = random_text(60, 0), random_text(20, 1)
    t = text.tolist()
    nats = [
        -math.log(naive_probability(train.tolist(), t[max(0, i - order + 1) : i], t[i]))
        for i in range(len(t))
    ]
    result = witten_bell_nats(train, text, order, vocab_size=VOCAB)
    assert result == pytest.approx(sum(nats) / len(nats), rel=1e-12)
