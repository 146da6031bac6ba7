"""The project's C++, compiled once for this processor if there is a C++ compiler.

Without one everything works, only slower. The compiled code is kept in
``$XDG_CACHE_HOME/invformer`` (``~/.cache/invformer``), under a name with digests of the source, the
compiler, the processor's features and the code itself. If that folder cannot be used, each process
compiles for itself. ``CXX`` names a compiler other than ``c++``.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invformer.kernels.host import cache_folder
from invformer.numerics.private import constant_when_compiled

log = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).with_name("cpp").glob("*.[ch]*"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
FORMATS = (torch.float32, torch.float64)
CPU = torch.device("cpu")
# A compiler that takes longer to describe the processor, or to compile, is given up. Compiling
# usually takes about ten seconds; on a busy machine it took 193.
ANSWER_S, COMPILATION_S = 60, 600


@constant_when_compiled
def is_available() -> bool:
    """True if there is compiled code for this processor; the first call may compile it."""
    return complaint() is None


def complaint() -> str | None:
    """Why there is no compiled code; None if there is."""
    found = _found()
    return found if isinstance(found, str) else None


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Run a compiled function for numbers of this format, if code :func:`is_available`."""
    if dtype not in FORMATS:
        raise ValueError(f"compiled code computes in float32 or float64, not {dtype}")
    function = getattr(_found(), f"{str(dtype).removeprefix('torch.')}_{name}")
    function.restype = ctypes.c_bool
    if not function(*arguments):
        raise MemoryError(f"not enough memory for {name}")


def occupies_threads(parts: int) -> bool:
    """True if this many indivisible parts keep at least half of the threads busy."""
    return 2 * parts >= torch.get_num_threads()


def threads_for(parts: int) -> ctypes.c_int:
    """As many threads as PyTorch uses, but at most one for each part."""
    return ctypes.c_int(max(1, min(torch.get_num_threads(), parts)))


def pointer(t: Tensor, *shape: int, dtype: torch.dtype) -> ctypes.c_void_p:
    """The address of the numbers of a tensor without gaps; it has to outlive the call.

    ValueError unless it is of this shape and format, in this process's memory.
    """
    require(t, shape, dtype)
    if not t.is_contiguous():
        raise ValueError(f"compiled code takes tensors without gaps, not strides {t.stride()}")
    return ctypes.c_void_p(t.data_ptr())


def require(
    t: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU
) -> None:
    """Raise ValueError unless compiled code for a device can read the tensor, however it lies."""
    is_there = is_readable(t) if device.type == "cpu" else t.device == device
    if t.shape != tuple(shape) or t.dtype != dtype or not is_there:
        raise ValueError(
            f"compiled code expects {tuple(shape)} in {dtype} on {device}, got {tuple(t.shape)} in "
            f"{t.dtype} on {t.device}"
        )


def is_readable(t: Tensor) -> bool:
    """True if there are numbers at the tensor's address, as they are, in this process's memory."""
    is_plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return is_plain and t.device.type == "cpu" and not t.is_neg()


@cache
def _found() -> ctypes.CDLL | str:
    """The compiled code, or why there is none."""
    try:
        return _load()
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())


def _load() -> ctypes.CDLL:
    """The compiled code; compiled here if no intact copy is kept."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    command = [_compiler(), *FLAGS, "-mcpu=native" if arm else "-march=native"]
    stem, folder = f"invformer-{_fingerprint(command)}", _own_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="invformer-") as scratch:
            return ctypes.CDLL(str(_compile(command, Path(scratch), stem)))
    for kept in folder.glob(f"{stem}-*.so"):
        with suppress(OSError):
            if kept.stem == f"{stem}-{_digest(kept)}":  # a truncated file would end the process
                return ctypes.CDLL(str(kept))
    log.warning("compiling for this processor, once; this may take minutes")
    return ctypes.CDLL(str(_compile(command, folder, stem)))


def _compiler() -> str:
    """``$CXX``, or the first compiler on the path."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        if found := shutil.which(name):
            return found
    raise OSError(f"{asked or 'a C++ compiler'} is not on the path")


def _fingerprint(command: list[str]) -> str:
    """A digest of the source, the flags and the compiler's macros for this processor."""
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull], ANSWER_S)
    parts = (*(source.read_text("utf-8") for source in SOURCES), " ".join(command), macros)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _own_folder() -> Path | None:
    """The cache folder, if only this user can write to it; None otherwise."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _compile(command: list[str], folder: Path, stem: str) -> Path:
    """Compile into a file whose name ends with the digest of its content.

    It is renamed at the end: several processes may compile at once, and any may be killed.
    """
    handle, unfinished = tempfile.mkstemp(suffix=".so.tmp", dir=folder)
    os.close(handle)
    try:
        units = [str(source) for source in SOURCES if source.suffix == ".cpp"]
        _run([*command, "-shared", *units, "-o", unfinished], COMPILATION_S)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        target = folder / f"{stem}-{_digest(Path(unfinished))}.so"
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return target


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run(command: list[str], seconds: float) -> str:
    """The output of a command; OSError with its first error if it failed."""
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", env=english,
        stdin=subprocess.DEVNULL, timeout=seconds,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        raise OSError(f"{command[0]} failed: {(errors or lines or ['no reason'])[0]:.300}")
    return done.stdout
