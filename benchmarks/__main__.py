"""python -m benchmarks [--quick | --full]: measure, print a table, write JSON and plots."""

import argparse
import json
import re
from pathlib import Path

import torch

from benchmarks.plots import plot_growth
from benchmarks.run import environment, load, measure_case
from benchmarks.suite import suite
from benchmarks.table import table

RESULTS = Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="suite",
                      help="one tiny case: does everything run?")  # fmt: skip
    size.add_argument("--full", action="store_const", const="full", dest="suite",
                      help="every size, for hours")  # fmt: skip
    parser.add_argument("--only", default="", metavar="REGEX",
                        help="cases whose name matches, such as n256-d128")  # fmt: skip
    parser.add_argument("--seconds", type=float, help="per case and task; the suite has a default")
    parser.add_argument("--threads", type=int, help="CPU threads; default is PyTorch's choice")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32",
                        help="of the forward pass on CUDA; a CPU uses float32")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"],
                        help="default: the CPU, then a GPU if there is one")  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--out", type=Path, help="JSON to write; plots go beside it")
    parser.set_defaults(suite="default")
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for; rows are on disk as soon as they exist."""
    args = parse()
    torch.set_flush_denormal(True)  # as train.py does
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    out = args.out or RESULTS / f"{args.suite}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(torch.get_num_threads()), "rows": []}
    for device in devices(args.device):
        measured = suite(args.suite, device.type)
        precision = args.precision if device.type == "cuda" else "float32"
        for case in measured.cases:
            if not re.search(args.only, case.name):
                continue
            print(f"{device.type} {case.name}", flush=True)
            seconds = args.seconds or measured.seconds
            for row in measure_case(case, device, precision, seconds, not args.no_memory):
                report["rows"].append(row)
                report["environment"]["load_average_after"] = load()
                out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    for picture in plot_growth(report, out):
        print(picture)
    print(out)


def devices(wanted: str | None) -> list[torch.device]:
    """Where to measure."""
    if wanted is not None:
        return [torch.device(wanted)]
    gpu = [torch.device("cuda")] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpu]


if __name__ == "__main__":
    main()
