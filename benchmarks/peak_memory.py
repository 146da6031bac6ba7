"""Peak memory of a training step, measured in a process of its own.

On a CPU: how far the high-water mark of the resident set rises above what the process held before
the model was built, over two steps; so weights, gradients, optimiser state and activations count.
The C library is told (MALLOC_MMAP_THRESHOLD_) to give every large block back to the system at once:
otherwise the mark would depend on what it keeps for later. On CUDA: the allocator's own record.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.models import Case, build
from benchmarks.tasks import Training
from invformer.kernels.attention import Kernel

STATUS = Path("/proc/self/status")
STEPS = 2


def measure_in_child(
    model: str, case: Case, device: str, precision: str, threads: int, kernel: Kernel = "auto"
) -> int:
    """Bytes.

    Raises:
        subprocess.CalledProcessError: the child failed; its message went to standard error.
    """
    question = {
        "model": model, "case": case.to_dict(), "device": device, "precision": precision,
        "threads": threads, "kernel": kernel,
    }  # fmt: skip
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.peak_memory", json.dumps(question)],
        env=environment, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return int(answer.stdout)


def peak_bytes(model: str, case: Case, device: torch.device, precision: str, kernel: Kernel) -> int:
    """Of two training steps in this process."""
    tiny = Case(16, 32, 1, 2, 1)
    Training(build(model, tiny, device, kernel), tiny, precision)()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = resident("VmRSS")
        reset_high_water_mark()
    step = Training(build(model, case, device, kernel), case, precision)
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return resident("VmHWM") - before


def reset_high_water_mark() -> None:
    """Forget the peak so far, where the system can (Linux)."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Bytes of the resident set, now (VmRSS) or at most (VmHWM)."""
    if not STATUS.exists():  # macOS knows the peak alone, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Answer the question on the command line."""
    question = json.loads(sys.argv[1])
    torch.set_num_threads(question["threads"])
    device = torch.device(question["device"])
    case = Case(**question["case"])
    precision, kernel = question["precision"], question["kernel"]
    print(peak_bytes(question["model"], case, device, precision, kernel))


if __name__ == "__main__":
    main()
