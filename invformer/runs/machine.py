"""What a program runs on and from: device, hardware, commit; and what it cannot do there."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from invformer.config.schema import TrainConfig, TrainerConfig
from invformer.errors import ConfigurationError
from invformer.kernels import native
from invformer.kernels.attention import LEAST_FLEX_CHANNELS
from invformer.kernels.host import compiler_complaint


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


def refuse_missing_hardware(config: TrainConfig) -> None:
    """Whether this machine can train as asked.

    Raises:
        ConfigurationError: it has too few such devices, the attention kernel cannot be trained on
            them, or nothing can be compiled for them.
    """
    refuse_missing_devices(config.trainer)
    refuse_missing_kernel(config)
    refuse_missing_compiler(config.trainer)


def refuse_missing_devices(config: TrainerConfig) -> None:
    """Whether this machine has what the run shall train on.

    Raises:
        ConfigurationError: it has not, or fewer.
    """
    cuda = torch.cuda.device_count()
    present = {"cuda": cuda, "gpu": cuda, "auto": cuda or config.devices}
    if config.devices > present.get(config.accelerator, config.devices):
        raise ConfigurationError(
            f"trainer.accelerator: {config.devices} devices of kind {config.accelerator} are asked "
            f"for, {present[config.accelerator]} are here; try trainer.accelerator=cpu"
        )


def refuse_missing_kernel(config: TrainConfig) -> None:
    """Whether the chosen attention can be trained where the run shall be.

    Raises:
        ConfigurationError: it cannot.
    """
    on_cpu = training_device(config.trainer).type == "cpu"
    kernel = config.model.attention_kernel
    if kernel == "flex" and on_cpu:
        raise ConfigurationError(
            "model.attention_kernel: flex has no backward pass on the CPU; pick auto or blocked"
        )
    if kernel == "native":
        missing = native.complaint() if on_cpu else "it is for the CPU"
        if missing is not None:
            raise ConfigurationError(
                f"model.attention_kernel: no native here ({missing}); pick auto"
            )
    if kernel == "flex" and config.model.head_width < LEAST_FLEX_CHANNELS:
        raise ConfigurationError(
            f"model.attention_kernel: flex needs heads of at least {LEAST_FLEX_CHANNELS} channels, "
            f"not {config.model.head_width}; pick auto, or fewer heads"
        )
    if kernel == "flex" and config.trainer.deterministic:
        raise ConfigurationError(
            "model.attention_kernel: flex adds up gradients in any order; pick auto, or "
            "trainer.deterministic=false"
        )


def refuse_missing_compiler(config: TrainerConfig) -> None:
    """Whether torch.compile works, where it is asked for.

    Raises:
        ConfigurationError: it does not.
    """
    complaint = compiler_complaint(training_device(config)) if config.compile else None
    if complaint is not None:
        raise ConfigurationError(
            f"trainer.compile: torch.compile does not work here ({complaint:.200}): install what "
            "it misses, or leave trainer.compile out"
        )


def training_device(config: TrainerConfig) -> torch.device:
    """The kind of device a run is on.

    It is never a Mac's GPU, which has no float64: constants are normalised and certified in it.
    """
    is_cpu = config.accelerator == "cpu" or not torch.cuda.device_count()
    return torch.device("cpu" if is_cpu else "cuda")


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
