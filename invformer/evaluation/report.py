"""What evaluate.py says: one nested dict, as a table and as JSON."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from invformer.errors import StorageError
from invformer.runs.console import printable


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the report atomically; numbers JSON has no literal for become null.

    Several programs may do so at once: each has a file of its own until it is complete.

    Raises:
        StorageError: the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(finite(report), indent=2, allow_nan=False) + "\n", "utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def finite(value: Any) -> Any:
    """The same tree with None for infinities and NaN."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(report: Mapping[str, Any]) -> None:
    """Print the report for people."""
    context = report["context"]
    print(f"{report['checkpoint']} (step {report['step']}) on {report['data']['name']}")
    lines = [
        (f"{report['data']['split']} bpc", f"{report['bpc']:.4f}"),
        ("nats per character", f"{report['nats']:.4f}"),
        *ngram_lines(report["ngram"]),
        ("characters scored", f"{report['num_characters']:,} in {report['precision']}"),
        ("context", f"{context['seq_len']} characters, stride {context['stride']}"),
        ("unknown symbols", f"{report['data']['unknown_rate']:.2e} of the split"),
        *certificate_lines(report["certificate"]),
        *inversion_lines(report["inversion"]),
        *(rate_line(name, rate) for name, rate in report["perf"].items()),
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"  {name:<{width}}  {value}")
    print_branches(report["local_lipschitz"])
    if report.get("sample"):
        print(f"--- sample ---\n{printable(report['sample'])}\n---")


def rate_line(name: str, rate: float) -> tuple[str, str]:
    """What was timed, and its characters per second."""
    task = name.removesuffix("_characters_per_second").replace("_", " ")
    return f"characters/s {task}", f"{rate:,.0f}"


def ngram_lines(ngram: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The n-gram's part of the table."""
    if ngram is None:
        return []
    return [(f"{ngram['order']}-gram bpc, for comparison", f"{ngram['bpc']:.4f}")]


def certificate_lines(certificate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The certificate's part of the table."""
    if certificate is None:
        return [("certificate", "none (not a contractive model)")]
    largest = max(certificate["per_branch"].values())
    what = "Lipschitz bound" if certificate["kind"] == "global" else "diagonal-block bound"
    metric = " of its metric" if certificate["in_metrics"] else ""
    lines = [
        (f"{what}, every block", f"≤ {largest:.6f} in {certificate['norm']}{metric}"),
        ("target", f"{certificate['target']}"),
    ]
    if certificate["total"] is not None:
        lines.append(("whole stack (not a contraction)", f"≤ {certificate['total']:.3e}"))
    return lines


def inversion_lines(inversion: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The inversion's part of the table."""
    if inversion is None:
        return []
    steps, error = inversion["num_steps"].values(), inversion["error_bound"]
    return [
        ("characters recovered", f"{inversion['characters_recovered']:.2%}"),
        ("… and certified", f"{inversion['characters_certified']:.2%}"),
        ("reconstruction error", f"{inversion['reconstruction_error']:.2e}"),
        ("proven error bound", f"{error:.2e}" if math.isfinite(error) else "none"),
        ("decoding margin", f"{inversion['decoding_margin']:.2e}"),
        (
            "another text with this output",
            f"within {inversion['preimage_bound']:.2e}, symbols are "
            f"{2 * inversion['decoding_margin']:.2e} apart",
        ),
        ("solver steps per layer", f"{min(steps)}–{max(steps)} ({inversion['method']})"),
        ("inverse costs", inversion_cost(inversion)),
    ]


def inversion_cost(inversion: Mapping[str, Any]) -> str:
    """Its time in forward passes of the stack, and without evidence or coarse if that was timed."""
    forward = inversion["seconds_forward"]
    cost = f"{inversion['seconds_inverse'] / forward:.1f} forward passes in {inversion['dtype']}"
    for key, what in (("bare", "without evidence"), ("coarse", "to float32's accuracy")):
        seconds = inversion[f"seconds_inverse_{key}"]
        if seconds is not None:
            cost += f", {seconds / forward:.1f} {what}"
    return cost


def print_branches(branches: Mapping[str, Mapping[str, Any]]) -> None:
    """Print estimate, local bound and bound of every branch, one norm at a time."""
    for norm, rows in branches.items():
        print(f"  {norm:<28} estimate ≤ local bound ≤ bound   (estimate converged)")
        for name, row in rows.items():
            local, bound = (
                "      –" if row[key] is None else f"{row[key]:7.4f}"
                for key in ("local_bound", "bound")
            )
            converged = "yes" if row["converged"] else f"residual {row['residual']:.1e}"
            print(f"    {name:<26} {row['estimate']:7.4f}   {local}   {bound}   ({converged})")
