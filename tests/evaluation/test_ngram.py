"""The n-gram baseline against its definition."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from invformer.evaluation import ngram
from invformer.evaluation.ngram import witten_bell_nats

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
def test_the_n_gram_agrees_with_its_definition(
    order: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "CHUNK", chunk)
    train, text = random_text(60, 0), random_text(20, 1)
    t = text.tolist()
    nats = [
        -math.log(naive_probability(train.tolist(), t[max(0, i - order + 1) : i], t[i]))
        for i in range(len(t))
    ]
    result = witten_bell_nats(train, text, order, vocab_size=VOCAB)
    assert result == pytest.approx(sum(nats) / len(nats), rel=1e-12)
