"""python -m benchmarks.table [FILE]: a results file as the table of benchmarks/README.md."""

import json
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser
from invformer.processes.console import outlive_console

RESULTS = Path(__file__).parent / "results" / "default.json"
HEAD = (
    "| row | characters/s | × dot_product | × plain | peak memory | that is |",
    "|---|---|---|---|---|---|",
)


def table(report: dict[str, Any]) -> str:
    """One line per row: medians, quartiles in brackets for the ratios."""
    return "\n".join([*HEAD, *(line(row) for row in report["rows"])])


def line(row: dict[str, Any]) -> str:
    """One row; its first column is the row's id in the results file."""
    rate = f"{row['characters_per_second'][0]:,.0f}"
    ratios = [ratio(row["times_as_fast_as"].get(base)) for base in ("dot_product", "plain")]
    memory = f"{row['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in row else ""
    return f"| {row['id']} | {rate} | {ratios[0]} | {ratios[1]} | {memory} | {meaning(row)} |"


def meaning(row: dict[str, Any]) -> str:
    """What a ratio to something else than a model says."""
    others = {base: spread[0] for base, spread in row["times_as_fast_as"].items()}
    match row["task"]:
        case "train" if "+monitor" in row["variant"]:
            return f"{1 / others['contractive_l2'] - 1:+.1%} of a step"
        case "normalisation" if "step" in others:
            return f"{1 / others['step']:.1%} of a step"
        case "invert" if "forward" in others:
            return f"{1 / others['forward']:.1f} forward passes"
    return ""


def ratio(spread: list[float] | None) -> str:
    """Median [quartiles]."""
    return "" if spread is None else f"{spread[0]:.2f} [{spread[1]:.2f}, {spread[2]:.2f}]"


def main() -> None:
    """Print it."""
    outlive_console()
    parser = Parser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS, help="JSON of a run")
    path = parser.parse_args().file
    try:
        text = table(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError):
        parser.error(f"{path} holds no results of python -m benchmarks")
    print(text)


if __name__ == "__main__":
    main()
