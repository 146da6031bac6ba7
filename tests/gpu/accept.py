"""python -m tests.gpu.accept --out DIR: what a GPU machine runs first; under eight minutes.

Each check writes its rows to DIR/accept.md as they end, so that a cut leaves the rest. It needs
torch 2.11 or newer, Python 3.11 or newer, and no network. On a processor everything is tiny and
CUDA's rules are emulated: a smoke test. ``python -m studies.at_size`` trains whole models.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from invformer.kernels.host import leave_new_memory_unfilled
from tests.gpu import checks, speed
from tests.gpu.machine import Machine, Report, Row, failed

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

CHECKS = (
    checks.arithmetic, checks.inversion, checks.skipped_step, checks.runs, checks.distributed,
    speed.steps, speed.monitor, speed.validation, checks.compiled,
)  # fmt: skip
SECONDS = 470.0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.accept", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    return parser.parse_args()


def check_all(machine: Machine, report: Report, only: str) -> None:
    """Every check, until time is up."""
    end = time.monotonic() + SECONDS
    for check in CHECKS:
        if only not in check.__name__:
            continue
        began = time.monotonic()
        try:
            for row in check(machine):
                report.add(row)
                if time.monotonic() > end:
                    raise TimeoutError(f"cut after {SECONDS:.0f} seconds")
        except TimeoutError as error:
            report.add(Row(check.__name__, "the rest", verdict="not run", note=str(error)))
        except Exception as error:
            report.add(failed(check.__name__, "the rest", error))
        report.add(Row(check.__name__, "whole", time.monotonic() - began, note="seconds"))


def main() -> int:
    """1 if a row failed."""
    args = parse()
    leave_new_memory_unfilled()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        machine = Machine(device, Path(folder))
        report = Report(args.out, machine.name)
        check_all(machine, report, args.only)
    bad, skipped = (sum(row.verdict == v for row in report.rows) for v in ("FAIL", "not run"))
    print(f"{len(report.rows)} rows, {bad} failed, {skipped} not run: {args.out / 'accept.md'}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
