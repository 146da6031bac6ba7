"""What the host keeps between steps."""

import platform
import subprocess
import sys

import pytest
import torch
from torch.utils import deterministic

from invformer.kernels.host import leave_new_memory_unfilled

STEPS = """
import resource, torch
from invformer.kernels.host import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        torch.ones(2**24)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = [faults() for _ in range(2)]
assert keep_freed_memory()
kept = [faults() for _ in range(8)]  # until blocks lie where later ones fit
assert kept[-1] < returned[-1] / 10, (returned, kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_come_without_new_pages_once_freed_memory_is_kept() -> None:
    subprocess.run([sys.executable, "-c", STEPS], check=True)


def test_new_memory_is_left_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    leave_new_memory_unfilled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
