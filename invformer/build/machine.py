"""What a program runs on and from: device, hardware, commit."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from invformer.errors import ConfigurationError


def pick_device(name: str, key: str) -> torch.device:
    """The named device, or for ``auto`` the best there is.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` and the like.
        key: the field that asks for it, for the error.

    Raises:
        ConfigurationError: this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigurationError(f"{key}: {name} is not available here") from None
    return device


def hardware(device: torch.device) -> str:
    """What the numbers were computed on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def processor() -> str:
    """The CPU's name."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout this program runs from, with a mark where files differ from it."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    words += ["--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
