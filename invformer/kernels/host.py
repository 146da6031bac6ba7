"""What the host may look at without waiting for the device, keep, and compile."""

import ctypes
import os
import warnings
from pathlib import Path

import torch


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/invformer``, by default ``~/.cache/invformer``; it may not exist.

    Raises:
        RuntimeError: nobody's home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invformer"


def compiler_complaint(device: torch.device) -> str | None:
    """What torch.compile misses for this device, such as a C++ compiler; None if it works.

    Asked of torch itself, by one small function: what it needs differs from device to device.
    Warnings, such as those of its own deprecated calls, are no complaint.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of several private classes, none of them common to all
        return str(error).partition("\n")[0]
    return None


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocation; whether it does.

    glibc hands blocks of 32 MiB and more back to the system when they are freed. Of larger models
    every activation is one: each step gets them anew, zeroed page by page, which is several percent
    of its time. The largest resident set of training steps was the same (docs/log.md); a loop that
    does nothing but take and free one block settles only after some ten of them.
    """
    trim_threshold, most_mapped_blocks = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return mallopt(most_mapped_blocks, 0) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def leave_new_memory_unfilled() -> None:
    """Have deterministic algorithms take memory as it comes, as others do.

    PyTorch fills it with NaN there, so that reading what was never written shows: 2 to 8 % of a
    training step (docs/log.md). Nothing of ours reads it: a test fills it, and sees the same bits.
    """
    torch._C._set_deterministic_fill_uninitialized_memory(False)
