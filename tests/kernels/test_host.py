"""What the host keeps between steps."""

import platform
import subprocess
import sys

import pytest
import torch
from torch.utils import deterministic

from invformer.kernels.host import leave_new_memory_unfilled

STEPS = """
import resource, sys, torch
from invformer.kernels.host import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(8):  # until blocks lie where later ones fit
    faults()
print(faults())
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_come_without_new_pages_once_freed_memory_is_kept() -> None:
    assert page_faults("kept") < page_faults("returned") / 10


def test_new_memory_is_left_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    leave_new_memory_unfilled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
