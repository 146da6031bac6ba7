"""The host's cache folder, its compiler for torch.compile, and its memory allocator."""

import ctypes
import errno
import os
import warnings
from pathlib import Path

import torch
from torch.utils import deterministic


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/invformer``, by default ``~/.cache/invformer``; it may not exist.

    FileNotFoundError for a user without a home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invformer"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory") from None


def compiler_complaint(device: torch.device) -> str | None:
    """Why torch.compile does not work for this device, such as no C++ compiler; None if it works.

    One small function is compiled to find out, because requirements differ between devices.
    Warnings do not count: torch warns of its own deprecated calls.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of several private classes, none of them common to all
        return str(error).partition("\n")[0]
    return None


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations; returns True if it does.

    glibc returns blocks of 32 MiB and more to the system when they are freed. Every activation of a
    larger model is such a block: each step would get them anew, zeroed page by page, which takes
    several percent of its time. The largest resident set of training steps was the same
    (docs/experiments.md); a loop that only allocates and frees one block settles after about ten.
    """
    trim_threshold, most_mapped_blocks = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return mallopt(most_mapped_blocks, 0) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def leave_new_memory_unfilled() -> None:
    """Keep PyTorch from filling new memory with NaN in deterministic runs.

    It does so to reveal reads of unwritten memory, at up to 12 % of a step
    (docs/experiments.md). We read none: a test fills it and sees the same bits.
    """
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
