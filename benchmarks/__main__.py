"""python -m benchmarks [--quick | --full]: measure, print a table, write JSON and plots."""

import argparse
import errno
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser
from benchmarks.plots import plot_growth
from benchmarks.run import Setting, environment, load, measure_case, measure_compiled, write
from benchmarks.suite import suite
from benchmarks.table import table
from invformer.kernels.host import compiler_complaint, keep_freed_memory
from invformer.numerics.precision import denormals_flushed
from invformer.processes.console import outlive_console

RESULTS = Path(__file__).parent / "results"
MOST_THREADS = 1024


def regex(word: str) -> re.Pattern[str]:
    """The value of ``--only``."""
    try:
        return re.compile(word)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no regular expression: {error}") from None


def seconds(word: str) -> float:
    """The value of ``--seconds``."""
    value = float(word)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is not above 0 and finite")
    return value


def threads(word: str) -> int:
    """The value of ``--threads``."""
    value = int(word)
    if not 1 <= value <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{word} is not in [1, {MOST_THREADS}]")
    return value


def parse() -> argparse.Namespace:
    """The command line, refused before anything is timed if nothing can be."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="suite",
                      help="one tiny case: does everything run?")  # fmt: skip
    size.add_argument("--full", action="store_const", const="full", dest="suite",
                      help="every size, for hours")  # fmt: skip
    parser.add_argument("--only", type=regex, default="", metavar="REGEX",
                        help="cases whose name matches, such as n256-d128; written to "
                        "SUITE-part.json")  # fmt: skip
    parser.add_argument(
        "--seconds", type=seconds, help="per case and task; the suite has a default"
    )
    parser.add_argument("--threads", type=threads, help="CPU threads; default is PyTorch's choice")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32",
                        help="of the forward pass on CUDA; a CPU uses float32")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"],
                        help="default: the CPU, then a GPU if there is one")  # fmt: skip
    parser.add_argument("--kernel", default="auto",
                        choices=["auto", "math", "native", "sdpa", "triton"],
                        help="what the attention of all models but plain runs on")  # fmt: skip
    parser.add_argument("--compile", action="store_true",
                        help="training steps with compiled blocks, and nothing else")  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--out", type=Path, help="JSON to write; plots go beside it")
    parser.set_defaults(suite="default")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: PyTorch finds no CUDA device here")
    if args.compile:
        for device in devices(args.device):
            if complaint := compiler_complaint(device):
                parser.error(f"argument --compile: torch.compile does not work here: {complaint}")
    suites = [suite(args.suite, device.type) for device in devices(args.device)]
    names = [case.name for measured in suites for case in measured.cases]
    if not any(args.only.search(name) for name in names):
        known = ", ".join(dict.fromkeys(names))
        parser.error(f"argument --only: {args.only.pattern!r} matches no case of: {known}")
    return args


def main() -> None:
    """Measure what was asked for; rows are on disk as soon as they exist.

    They take the place of earlier results when all of them do.
    """
    outlive_console()
    args = parse()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    out = args.out or RESULTS / f"{default_name(args)}.json"
    partial = out.with_name(f"{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
        partial.write_text("")
    except OSError as error:
        print(f"error: argument --out: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(7) from None
    report = {"environment": environment(torch.get_num_threads(), args.kernel), "rows": []}
    try:
        keep_freed_memory()  # as train.py does, and flush denormals
        with denormals_flushed():
            measure(args, report, partial)
    except KeyboardInterrupt:
        kept = f"{partial} keeps {len(report['rows'])} rows"
        print(f"error: interrupted; {kept}, {out} is as it was", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    os.replace(partial, out)
    print(table(report))
    for picture in plot_growth(report, out):
        print(picture)
    print(out)


def default_name(args: argparse.Namespace) -> str:
    """The name of the results: those of a few cases never take the place of a whole suite's."""
    compiled = "-compiled" if args.compile else ""
    kernel = "" if args.kernel == "auto" else f"-{args.kernel}"
    return f"{args.suite}{compiled}{kernel}{'-part' if args.only.pattern else ''}"


def measure(args: argparse.Namespace, report: dict[str, Any], out: Path) -> None:
    """Add the rows of every case that was asked for, and write all after each."""
    for device in devices(args.device):
        measured = suite(args.suite, device.type)
        precision = args.precision if device.type == "cuda" else "float32"
        for case in measured.cases:
            if not args.only.search(case.name):
                continue
            print(f"{device.type} {case.name}", flush=True)
            setting = Setting(
                case, device, precision, args.seconds or measured.seconds, args.kernel
            )
            if args.compile:
                rows = measure_compiled(setting)
            else:
                rows = measure_case(setting, memory=not args.no_memory)
            for row in rows:
                report["rows"].append(row)
                report["environment"]["load_average_after"] = load()
                write(report, out)


def devices(wanted: str | None) -> list[torch.device]:
    """Where to measure."""
    if wanted is not None:
        return [torch.device(wanted)]
    gpu = [torch.device("cuda")] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpu]


if __name__ == "__main__":
    main()
