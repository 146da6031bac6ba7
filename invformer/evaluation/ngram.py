"""The baseline a language model has to beat: an interpolated Witten–Bell character n-gram."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.processes.bar import Bar

CHUNK = 1 << 20  # characters of the training text that are counted at a time
ORDER = 5
MOST_COUNTED = 100_000_000  # characters of the training text, its beginning


@dataclass(frozen=True)
class NgramScore:
    """How well an n-gram predicts a text."""

    order: int  # n
    nats: float  # per character
    bpc: float  # bits per character
    num_characters: int  # of the training text that were counted


def ngram_baseline(
    learnt: Integer[Tensor, "train_characters"],
    tokens: Integer[Tensor, "eval_characters"],
    vocab_size: int,
) -> NgramScore:
    """Score a text with the 5-gram of a model's training text, of which it counts the beginning.

    Counting takes two seconds for a million characters.
    """
    learnt = learnt[:MOST_COUNTED]
    nats = witten_bell_nats(learnt, tokens, ORDER, vocab_size=vocab_size)
    return NgramScore(ORDER, nats, nats / math.log(2), len(learnt))


def witten_bell_nats(
    train_tokens: Integer[Tensor, "train_characters"],
    eval_tokens: Integer[Tensor, "eval_characters"],
    order: int = 5,
    *,
    vocab_size: int,
) -> float:
    """Mean nats per character of a text under an n-gram model of another.

    With h the last k characters, h' the last k − 1 of them, c(·) counts in the training text and
    T(h) the number of distinct characters that followed h there,

        P_k(x | h) = (c(h x) + T(h) P_{k−1}(x | h')) / (c(h) + T(h)),    P_{−1}(x) = 1 / V,

    and P_k = P_{k−1} where h never occurred. The model is P_{order−1}; it has no parameter to tune.
    Every character counts once; one with fewer than order − 1 predecessors uses those it has, the
    first none.

    Cost: ``order`` sorts of either text; seconds for a million characters. The training text may be
    longer than the memory: counts are kept of what the other one has.

    Source: Witten & Bell 1991, "The zero-frequency problem", method C; interpolated as in Chen &
        Goodman 1999, §2.
    """
    depth = min(order, len(eval_tokens), len(train_tokens))
    counts, places, contexts = [], [], [torch.zeros(len(eval_tokens), dtype=torch.int64)]
    for _ in range(depth):
        keys, place = (contexts[-1] * vocab_size + eval_tokens.long()).unique(return_inverse=True)
        counts.append(Counts(keys, int(contexts[-1].max()) + 1, vocab_size))
        places.append(place)
        contexts.append(place.roll(1))  # wrong where there are too few predecessors: never read
    starts = range(0, len(train_tokens), CHUNK)
    for start in Bar(starts, desc=f"{order}-gram", unit="million characters"):
        before = min(start, depth - 1)  # characters that are counted already
        text = train_tokens[start - before : start + CHUNK].long()
        context = torch.zeros_like(text)
        for k, counted in enumerate(counts):
            place = counted.add(context, text[k:], max(0, before - k))
            context = place[:-1]
    probability = torch.full((len(eval_tokens),), 1 / vocab_size, dtype=torch.float64)
    for k, (counted, place, context) in enumerate(zip(counts, places, contexts[:-1], strict=True)):
        probability[k:] = counted.interpolate(probability[k:], place[k:], context[k:])
    return -probability.log().mean().item()


class Counts:
    """Counts of the (k+1)-grams h x of the evaluation text, which have the sorted ``keys``.

    A key is V · (the place of h among the sorted keys of k-grams) + x.
    """

    def __init__(self, keys: Integer[Tensor, "grams"], num_contexts: int, vocab_size: int) -> None:
        self.keys, self.vocab_size = keys, vocab_size
        self.grams = torch.zeros(len(keys), dtype=torch.int64)  # c(h x)
        self.contexts = torch.zeros(num_contexts, dtype=torch.int64)  # c(h)
        self.followed = torch.empty(0, dtype=torch.int64)  # keys of all that followed a known h

    def add(
        self, context: Integer[Tensor, "n"], text: Integer[Tensor, "n"], num_counted: int
    ) -> Integer[Tensor, "n"]:
        """Count characters after their contexts, but not the first ones, which were counted before.

        Returns each gram's place among the keys, −1 if the evaluation text does not have it.
        """
        key = torch.where(context < 0, -1, context * self.vocab_size + text)
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        place = place.where(self.keys[place] == key, -1)
        new, of_new, known = key[num_counted:], place[num_counted:], context[num_counted:]
        self.grams += of_new[of_new >= 0].bincount(minlength=len(self.grams))
        self.contexts += known[known >= 0].bincount(minlength=len(self.contexts))
        self.followed = torch.cat([self.followed, new[new >= 0].unique()]).unique()
        return place

    def interpolate(
        self,
        lower: Float[Tensor, "n"],
        place: Integer[Tensor, "n"],
        context: Integer[Tensor, "n"],
    ) -> Float[Tensor, "n"]:
        """P_k of grams from P_{k−1}."""
        followers = (self.followed // self.vocab_size).bincount(minlength=len(self.contexts))
        c, t = self.contexts[context], followers[context]
        return ((self.grams[place] + t * lower) / (c + t)).where(c > 0, lower)
