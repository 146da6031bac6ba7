"""Independent work on several cores of the processor."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from invformer.numerics.precision import changed

MAX_THREADS = 8  # more wait for one another in Python


@contextmanager
def threads() -> Iterator[Callable[..., Iterator[Any]]]:
    """A map by several threads, without gradients, in each of which PyTorch takes no others.

    Where all of them share every product instead, they wait for one another hundreds of times a
    second, on a busy machine for many times as long as they compute.
    """
    count = min(torch.get_num_threads(), MAX_THREADS)
    with changed(torch.get_num_threads, torch.set_num_threads, 1):
        pool = ThreadPoolExecutor(count)
        try:
            yield lambda f, *items: pool.map(torch.no_grad()(f), *items)
        finally:
            pool.shutdown(cancel_futures=True)
