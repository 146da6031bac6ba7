"""Measure the cases of a suite, one after the other."""

import datetime
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS, Case, build, compile_blocks
from benchmarks.peak_memory import measure_in_child
from benchmarks.tasks import (
    GENERATED,
    Evaluation,
    Generation,
    Inversion,
    Normalisation,
    StackForward,
    Training,
    Work,
)
from benchmarks.timing import Spread, in_turns, paired
from invformer.kernels import native
from invformer.kernels.attention import Kernel
from invformer.runs.machine import commit, cpu_name

Row = dict[str, Any]
# The monitor at every step and every branch, at so many characters of one window.
PROBE_LENGTHS = (16, 32)
# Generation is sequential, and inversion solves many layers: beyond this they only take time.
LONGEST_SEQUENTIAL = 1024


@dataclass(frozen=True)
class Setting:
    """What all rows of one case share.

    Attributes:
        case: sizes.
        device: where.
        precision: float32, or bf16 under autocast.
        seconds: per task.
        kernel: what attention runs on.
    """

    case: Case
    device: torch.device
    precision: str
    seconds: float
    kernel: Kernel = "auto"

    def rows(self, task: str, work: dict[str, Work], characters: int) -> Iterator[Row]:
        """One row per piece of work, all in turns."""
        common = {"device": self.device.type, "precision": self.precision, "task": task}
        for row in compare(work, characters, self.seconds, self.device):
            name = f"{self.device.type}/{task}/{row['variant']}/{self.case.name}"
            yield {"id": name, **self.case.to_dict(), "case": self.case.name, **common, **row}

    def build(self, name: str) -> nn.Module:
        """One model."""
        return build(name, self.case, self.device, self.kernel)

    def training(self, model: nn.Module, probe_length: int | None = None) -> Training:
        """Its training step."""
        return Training(model, self.case, self.precision, probe_length)


def measure_case(setting: Setting, memory: bool) -> Iterator[Row]:
    """All rows of one case: each task, with all models that can do it in turns."""
    case, device, precision = setting.case, setting.device, setting.precision
    models = {name: setting.build(name) for name in MODELS}
    contractive = models["contractive_l2"]
    training: dict[str, Work] = {n: setting.training(m) for n, m in models.items()}
    for length in PROBE_LENGTHS:
        if length <= case.seq_len:
            watched = setting.build("contractive_l2")
            training[f"contractive_l2+monitor{length}"] = setting.training(watched, length)
    for row in setting.rows("train", training, case.characters):
        if memory and row["variant"] in models:
            threads = torch.get_num_threads()
            row["peak_bytes"] = measure_in_child(
                row["variant"], case, device.type, precision, threads, setting.kernel
            )
        yield row
    share = {"step": training["contractive_l2"], "normalisation": Normalisation(contractive)}
    yield from setting.rows("normalisation", share, case.characters)
    evaluation: dict[str, Work] = {n: Evaluation(m, case, precision) for n, m in models.items()}
    yield from setting.rows("evaluate", evaluation, case.characters)
    if case.seq_len > LONGEST_SEQUENTIAL:
        return
    inversion: dict[str, Work] = {
        "forward": StackForward(contractive, case),
        "picard": Inversion(contractive, case),
        "picard-without-evidence": Inversion(contractive, case, evidence=False),
    }
    yield from setting.rows("invert", inversion, case.characters)
    for task, num_prompts in (("generate", 1), ("generate-together", case.batch_size)):
        generation: dict[str, Work] = {
            name: Generation(model, case, num_prompts)
            for name, model in models.items()
            if name != "plain"
        }
        yield from setting.rows(task, generation, num_prompts * GENERATED)


def measure_compiled(setting: Setting) -> Iterator[Row]:
    """Training steps with compiled blocks, in turns with two models that are not compiled.

    What was compiled for other sizes is forgotten: after eight of them torch would compile no more.
    """
    torch.compiler.reset()
    work: dict[str, Work] = {
        name: setting.training(compile_blocks(setting.build(name))) for name in MODELS
    }
    for name in ("dot_product", "contractive_l2"):
        work[f"{name}-eager"] = setting.training(setting.build(name))
    yield from setting.rows("train-compiled", work, setting.case.characters)


def compare(
    work: dict[str, Work], characters: int, seconds: float, device: torch.device
) -> Iterator[Row]:
    """One row per piece of work: characters/s, and how many times as fast as the others."""
    found = in_turns(work, seconds, device)
    for name, times in found.items():
        yield {
            "variant": name,
            "characters_per_second": Spread.of([characters / t for t in times]).to_list(),
            "turns": len(times),
            "times_as_fast_as": {
                base: paired(found[base], times).to_list() for base in found if base != name
            },
        }


def environment(threads: int, kernel: Kernel = "auto") -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "kernel": kernel,
        "compiled_attention": native.complaint() or "yes",
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average_before": load(),
    }


def write(report: dict[str, Any], out: Path) -> None:
    """A results file: JSON with the environment, and every row, on a line of its own."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in report["rows"])
    environment = json.dumps(report["environment"], ensure_ascii=False)
    text = f'{{"environment": {environment},\n"rows": [\n{rows}\n]}}\n'
    out.write_text(text, encoding="utf-8")


def load() -> list[float] | None:
    """How many processes wanted to run in the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None
