"""Settings every test shares: float64, one thread, no network, no W&B server."""

import os
from collections.abc import Iterator

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _double_precision_and_a_fixed_seed() -> Iterator[None]:
    """float64 unless a test says otherwise, the same random numbers in any order of tests."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(previous)


def pytest_configure() -> None:
    torch.set_num_threads(1)
