"""python -m tests.gpu.accept --out DIR: what a GPU machine runs first; under eight minutes.

Each check writes its rows to DIR/accept.jsonl and DIR/accept.md as it ends, so that a cut leaves
the rest. It needs torch 2.11 or newer, Python 3.11 or newer, and no network. ``--train TEXT`` is a
run of its own: nine minutes of nanoGPT's Shakespeare configuration. On a processor everything is
tiny and CUDA's rules are emulated: a smoke test.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from invformer.kernels.host import leave_new_memory_unfilled
from tests.gpu import checks, speed
from tests.gpu.machine import Machine, Report, Row, at_most, failed, holds

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

CHECKS = (
    checks.arithmetic, checks.inversion, checks.skipped_step, checks.runs, checks.distributed,
    speed.steps, speed.monitor, speed.validation, speed.attention, checks.compiled,
)  # fmt: skip
SECONDS, TRAIN_SECONDS = 470.0, 540.0
NANOGPT = 1.4697  # nats, nanoGPT's README: its best validation loss at this size


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.accept", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--train", type=Path, metavar="TEXT", help="tiny Shakespeare, one file")
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


def train(machine: Machine, report: Report, text: Path) -> None:
    """nanoGPT's GPU size on a text for nine minutes; the best validation against its own."""
    root = report.folder / "runs"
    words = [
        sys.executable, "train.py", "experiment=nanogpt_gpu", "data=text_file",
        f"data.path={text.resolve()}", "data.val_fraction=0.1", "data.test_fraction=0",
        "logger=none", "run.name=nanogpt", f"run.root={root.resolve()}", "trainer.progress=false",
    ]  # fmt: skip
    if not machine.is_gpu:
        words += [
            "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_steps=4",
            "model.d_model=48", "model.num_layers=1", "data.max_characters=20000",
        ]  # fmt: skip
    process = subprocess.Popen(words, cwd=Path(__file__).parents[2])
    try:
        process.wait(TRAIN_SECONDS - 30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it saves, and the same command would continue
        process.wait(60)
    code = process.returncode
    ended = code in (0, 128 + signal.SIGTERM)
    report.add(holds("nanoGPT's Shakespeare", "the run ends", ended, f"exit code {code}"))
    lines = (root / "nanogpt" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    best = min((row["val/nats"], row["step"]) for row in rows if "val/nats" in row)
    case = f"step {best[1]} of {rows[-1]['step'] + 1}"
    if machine.is_gpu:
        report.add(at_most("nanoGPT's Shakespeare, nats", case, best[0], NANOGPT))
    else:
        report.add(
            Row("nanoGPT's Shakespeare, nats", case, best[0], NANOGPT, "not run", "needs a GPU")
        )


def main() -> int:
    """1 if a row failed."""
    args = parse()
    leave_new_memory_unfilled()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accept.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        machine = Machine(device, Path(folder))
        report = Report(args.out, machine.name)
        if args.train is not None:
            train(machine, report, args.train)
        else:
            check_all(machine, report, args.only)
    bad, skipped = (sum(row.verdict == v for row in report.rows) for v in ("FAIL", "not run"))
    print(f"{len(report.rows)} rows, {bad} failed, {skipped} not run: {args.out / 'accept.md'}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
