"""Windows of a text: in a reproducible order for training, every character once for evaluation."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from invformer.data.tokens import Tokens

Windows = Integer[Tensor, "batch seq_len"]
Batch = tuple[Windows, Windows]


def first_sequences(tokens: Tokens, seq_len: int, count: int) -> Windows:
    """Up to ``count`` full sequences from the beginning of a text, or all of a shorter text."""
    count = max(1, min(count, len(tokens) // seq_len))
    length = min(seq_len, len(tokens))
    return tokens[: count * length].long().view(count, length)


@lru_cache(maxsize=2)
def epoch_order(
    num_characters: int, num_windows: int, seed: int, epoch: int
) -> tuple[int, Integer[Tensor, "windows"]]:
    """Where an epoch cuts the ring and the order of its windows, from (seed, epoch) alone."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    offset = int(torch.randint(num_characters, (), generator=generator))
    return offset, torch.randperm(num_windows, generator=generator)


@dataclass(frozen=True, eq=False)
class TrainingWindows:
    """Batches of an endless training order, a pure function of the fields.

    The text is read as a ring. An epoch cuts it at a random place into ⌊n / N⌋ windows that do not
    overlap and takes them in random order; the next epoch cuts elsewhere. So within an epoch no
    character is a target twice, and each is left out with probability (n mod N) / n. About one
    window per epoch runs over the text's end into its beginning.

    It takes the place of a ``DataLoader``, which would draw from the global random generator each
    time it is iterated.

    W processes with batches of b see, side by side, the batches of W b that one process sees.
    """

    tokens: Tokens  # the text, n ≥ N of them
    seq_len: int  # N, the length of a window
    batch_size: int  # windows per batch and process
    seed: int  # of the order
    start: Callable[[], int] = int  # number of the first batch, asked for at each iteration
    rank: int = 0
    world_size: int = 1  # W

    def __iter__(self) -> Iterator[Batch]:
        """Batches from ``start()`` on, without end."""
        return map(self.batch, itertools.count(self.start()))

    def batch(self, number: int) -> Batch:
        """(inputs, targets) of a batch: int64, each target the character after its input."""
        num_windows = len(self.tokens) // self.seq_len
        first = (number * self.world_size + self.rank) * self.batch_size
        order = torch.arange(first, first + self.batch_size)
        starts = torch.empty_like(order)
        for epoch in range(first // num_windows, int(order[-1]) // num_windows + 1):
            offset, permutation = epoch_order(len(self.tokens), num_windows, self.seed, epoch)
            here = order.div(num_windows, rounding_mode="floor") == epoch
            starts[here] = offset + self.seq_len * permutation[order[here] % num_windows]
        positions = (starts[:, None] + torch.arange(self.seq_len + 1)) % len(self.tokens)
        windows = self.tokens[positions].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, eq=False)
class EvaluationWindows:
    """Windows that predict every character of a text exactly once, except the first.

    Window w reads the tokens [w s, w s + N) and predicts each one's successor. With the stride
    s = N windows do not overlap. With s < N all but the first window read N − s characters again
    and score the last s, so that a character is predicted from at least N − s + 1 characters (as
    far as the text has them), at N / s times the cost.

    The text's first character has no context: charge it log(vocabulary size), so that the mean is
    over all n. The last window is padded with token 0, and a process that runs out
    of windows gets an empty one, so that all have the same number of batches; nothing of that is
    scored.

    Of several processes each takes every ``world_size``-th batch.
    """

    tokens: Tokens  # the text, n ≥ 2 of them
    seq_len: int  # N, the length of a window
    stride: int  # s in [1, N], how far one window is from the next
    batch_size: int = 64
    rank: int = 0
    world_size: int = 1

    @property
    def num_windows(self) -> int:
        """1 + ⌈(n − 1 − N) / s⌉, or 1 for a text that fits into one window."""
        return 1 + max(0, -(-(len(self.tokens) - 1 - self.seq_len) // self.stride))

    def __len__(self) -> int:
        """Batches per process, the same for all."""
        return -(-self.num_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[tuple[Windows, Windows, Bool[Tensor, "batch seq_len"]]]:
        """Yield (inputs, targets, scored): int64, int64, and True where a target is scored."""
        for batch in range(len(self)):
            first = (batch * self.world_size + self.rank) * self.batch_size
            last = min(first + self.batch_size, self.num_windows)
            numbers = torch.arange(first, max(first + 1, last))
            positions = numbers[:, None] * self.stride + torch.arange(self.seq_len + 1)
            inside = (positions < len(self.tokens)) & (numbers < self.num_windows)[:, None]
            windows = self.tokens[positions.where(inside, 0)].long().where(inside, 0)
            read_before = torch.where(numbers == 0, 0, self.seq_len - self.stride)
            scored = inside[:, 1:] & (torch.arange(self.seq_len) >= read_before[:, None])
            yield windows[:, :-1], windows[:, 1:], scored
