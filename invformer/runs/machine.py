"""What a program runs on and from: device, hardware, commit; and what it cannot do there."""

import platform
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from invformer.errors import ConfigurationError
from invformer.kernels import native, triton_attention
from invformer.kernels.host import compiler_complaint
from invformer.processes.ranks import launcher_value, usable_cores

if TYPE_CHECKING:  # benchmarks ask for the commit, and load no configuration
    from invformer.config.schema import TrainConfig, TrainerConfig


def pick_device(name: str, key: str) -> torch.device:
    """The device of this name, for ``auto`` the best there is.

    ``key`` is the field that has the name, for the ConfigurationError if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigurationError(f"{key}: {name} is not available here") from None
    return device


def refuse_missing_devices(config: "TrainerConfig") -> None:
    """Raise ConfigurationError if there are fewer devices than asked for.

    A processor counts as one device a core; two are always there, to try things out.
    """
    cuda, cores = torch.cuda.device_count(), max(2, usable_cores())
    present = {"cuda": cuda, "gpu": cuda, "cpu": cores, "auto": cuda or cores}[config.accelerator]
    if config.devices > present:
        raise ConfigurationError(
            f"trainer.devices: {config.devices} of kind {config.accelerator} are asked for, "
            f"{present} are here (a processor has one a core); ask for fewer or for another kind"
        )


def refuse_missing_requirements(config: "TrainConfig") -> None:
    """Raise ConfigurationError if this machine cannot train as asked.

    Checked are the number of devices and of torchrun's processes, the attention kernel, the
    compiler and the loggers.
    """
    trainer = config.trainer
    refuse_missing_devices(trainer)
    config.require_equal_shares(launcher_value("WORLD_SIZE", 1))
    device = training_device(trainer)
    kernel, missing = config.model.attention_kernel, None
    if kernel == "native":
        missing = native.complaint() if device.type == "cpu" else "it is for the CPU"
    elif kernel == "triton":
        missing = triton_attention.complaint(device)
    if missing is not None:
        raise ConfigurationError(f"model.attention_kernel: no {kernel} here ({missing}); pick auto")
    if trainer.compile and (complaint := compiler_complaint(device)) is not None:
        raise ConfigurationError(
            f"trainer.compile: torch.compile does not work here ({complaint:.200}): install what "
            "it misses, or leave trainer.compile out"
        )
    if "tensorboard" in config.logger.name and find_spec("tensorboard") is None:
        raise ConfigurationError(
            "logger.name: tensorboard is not installed: pip install 'invformer[tensorboard]'"
        )


def training_device(config: "TrainerConfig") -> torch.device:
    """The kind of device a run is on.

    It is never a Mac's GPU, which has no float64: constants are normalised and certified in it.
    """
    is_cpu = config.accelerator == "cpu" or not torch.cuda.device_count()
    return torch.device("cpu" if is_cpu else "cuda")


def commit() -> str | None:
    """The commit of the checkout this program runs from, marked if files differ from it."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():  # installed, perhaps below somebody else's repository
        return None
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    words += ["--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def cpu_name() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text("utf-8") if info.exists() else "")
    return found[1] if found else platform.processor() or platform.machine()
