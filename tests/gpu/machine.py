"""What the checks share: the machine, sizes, models, and rows."""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu.emulation import cuda_rules

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
MODELS = (
    "contractive_l2", "contractive_bounded", "contractive_l2_paper", "causal_l2", "causal_bounded",
    "l2", "dot_product", "reversible",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str  # what was measured
    case: str
    value: float | None = None
    limit: float | None = None  # the largest value that passes
    verdict: str = "measured"  # or pass, FAIL, not run
    note: str = ""  # the unit, an error in one line, or the reason

    def markdown(self) -> str:
        """One line."""
        value, limit = (f"{x:.3g}" if x is not None else "" for x in (self.value, self.limit))
        return f"| {self.check} | {self.case} | {value} | {limit} | {self.verdict} | {self.note} |"


def at_most(check: str, case: str, value: float, limit: float, note: str = "") -> Row:
    """A row that passes if the value, which NaN is not, is at most the limit."""
    verdict = "pass" if value <= limit else "FAIL"
    return Row(check, case, float(value), float(limit), verdict, note)


def holds(check: str, case: str, is_true: bool, note: str = "") -> Row:
    """A row that passes if something is so."""
    return Row(check, case, verdict="pass" if is_true else "FAIL", note=note)


def failed(check: str, case: str, error: Exception) -> Row:
    """A row for what was raised; a missing wheel, or a kernel's refusal, is nobody's failure."""
    missing = isinstance(error, ModuleNotFoundError) or "attention kernel" in str(error)
    note = f"{type(error).__name__}: {' '.join(str(error).split()):.200}".replace("|", "/")
    return Row(check, case, verdict="not run" if missing else "FAIL", note=note)


@dataclass
class Report:
    """DIR/accept.md, written again after every row."""

    folder: Path
    head: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row, and show it."""
        self.rows.append(row)
        lines = ["| check | case | value | limit | verdict | note |", "|---|---|---|---|---|---|"]
        lines += [row.markdown() for row in self.rows]
        text = f"{self.head}\n\n" + "\n".join(lines) + "\n"
        (self.folder / "accept.md").write_text(text, encoding="utf-8")
        print(row.markdown(), flush=True)


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and how large they are: tiny on a processor, which is a smoke test."""

    device: torch.device
    folder: Path

    @property
    def is_gpu(self) -> bool:
        """Whether it is the real thing."""
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """What the head of the table says."""
        emulated = "a processor, CUDA's rules emulated"
        device = torch.cuda.get_device_name() if self.is_gpu else emulated
        return f"{device}; torch {torch.__version__}, Python {platform.python_version()}"

    def rules(self) -> AbstractContextManager[None]:
        """CUDA's, emulated where there is none."""
        return nullcontext() if self.is_gpu else cuda_rules()

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median seconds of each piece of work, in turns; on a GPU after warming up."""
        from benchmarks.timing import median_seconds

        if self.is_gpu:
            median_seconds(work, 2)
        return median_seconds(work, 10 if self.is_gpu else 3)

    def config(self, *words: str) -> Any:
        """A configuration as train.py would have it."""
        from invformer.config.load import load_config

        return load_config(words)

    def model(self, name: str) -> tuple[nn.Module, torch.Tensor]:
        """A small model in float32 on the processor, and text for it."""
        from invformer.assemble.model import build_model

        width, tokens, layers = (64, 160, 2) if self.is_gpu else (32, 40, 1)
        words = [f"model={name}", f"model.d_model={width}", "model.num_heads=2"]
        config = self.config(*words, f"model.num_layers={layers}", f"data.seq_len={tokens}")
        torch.manual_seed(0)
        model = build_model(config.model, 65, tokens)
        text = torch.randint(65, (3, tokens + 1))
        model.initialise(text[:, :-1])
        return model.train(), text
