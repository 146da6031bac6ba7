"""An evaluation as a table and in words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from invformer.evaluation.evaluate import MOSTLY
from invformer.numerics.rounding import downwards, shortened_down, upwards
from invformer.runs.checkpoint import CHECKPOINTS

DIFFERING = "the texts or their units differ: bits per character do not compare"


def print_table(report: Mapping[str, Any], verbose: bool = False) -> None:
    """Print the result, then details, then one line a branch (``verbose``: in every norm)."""
    data = report["data"]
    print(f"{report['checkpoint']} (step {report['step']}) on {data['name']}, {data['split']}")
    blocks = [columns(headlines(report)), columns(details(report))]
    norms = certified_first(report)
    for norm, rows in norms if verbose else norms[:1]:
        heading = name_of_norm(norm, report["certificate"])
        blocks.append([f"  {heading:<24}   estimate ≤ local bound ≤      bound"])
        for name, estimate, local, bound in branch_cells(rows):
            row = rows[name]
            note = "" if row["converged"] else f"   (residual {row['residual']:.1e})"
            line = f"    {name:<24} {estimate:>8}   {local:>11}   {bound:>11}{note}"
            blocks[-1].append(line)
    print("\n\n".join(map("\n".join, blocks)))


def columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in lines)
    return [f"  {name:<{width}}  {value}" for name, value in lines]


def branch_cells(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Name, estimate, local bound and bound of every branch."""
    bounds = ("local_bound", "bound")
    return [
        [
            name,
            f"{row['estimate']:.4f}",
            *("–" if row[key] is None else upwards(row[key], 4) for key in bounds),
        ]
        for name, row in rows.items()
    ]


def headlines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """At most six lines that say how good, how certain and how fast the model is."""
    certificate, inversion, data = report["certificate"], report["inversion"], report["data"]
    ngram, perf = report["ngram"], report["perf"]
    beside = f"  ({ngram['order']}-gram: {ngram['bpc']:.4f})" if ngram else ""
    lines = [(f"{data['split']} bpc", f"{report['bpc']:.4f}{beside}")]
    unknown = "unknown to this vocabulary"
    if data["unknown_rate"] > MOSTLY:
        share = f"{data['unknown_rate']:.1%} of the text is {unknown}, one symbol for all of it"
        lines.insert(0, ("mostly unknown", share))
    if not data["same_as_training"]:
        share = f"{data['unknown_rate']:.1%} of the text is {unknown}"
        lines.append(("another text", f"{data['name']}; {share}"))
    none = ("certificate", "none (not a contractive model)")
    lines.append(("every branch proven", largest_proven(certificate)) if certificate else none)
    if inversion is not None:
        recovered, proven = shares(inversion)
        of_these = inversion["unknown_rate"]
        more = f"; {of_these:.1%} of these are {unknown}" if of_these else ""
        recovered += f" of the {'symbols' if more else 'characters'} recovered"
        tried, count = inversion.get("characters_tried"), inversion["num_characters"]
        if tried is not None and tried < count:
            more += f"; the proof tried {tried} of {count} (evaluate.proof_limit)"
        lines.append(("inversion", f"{recovered}, {proven} proven{more}"))
    if measured := report["local_lipschitz"].get("token_max"):
        worst, name = max((row["estimate"], name) for name, row in measured.items())
        norm = name_of_norm("token_max", certificate)
        lines.append(("largest local estimate", f"{worst:.4f} in {norm} ({name})"))
    words = {"forward": "read", "inverse": "inverted", "generate": "generated"}
    words["generate_32_texts"] = "in 32 texts at once"
    rates = {word: perf.get(f"{key}_characters_per_second") for key, word in words.items()}
    known = ", ".join(f"{rate:,.0f} {word}" for word, rate in rates.items() if rate is not None)
    return [*lines, ("characters per second", known)]


def details(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers behind the headlines."""
    context, certificate, inversion = (report[k] for k in ("context", "certificate", "inversion"))
    scored, size = report["num_characters"], report["data"]["split_characters"]
    of_size = "" if scored == size else f" of {size:,}, the first ones,"
    lines = [
        ("nats per character", f"{report['nats']:.4f}"),
        ("characters scored", f"{scored:,}{of_size} in {report['precision']}"),
        ("context", f"{context['seq_len']} characters, stride {context['stride']}"),
        ("unknown symbols", f"{report['data']['unknown_rate']:.2%} of the text"),
    ]
    if certificate is not None and certificate["total"] is not None:
        why = "a product over all branches and scalings"
        lines.append(("bound on the whole stack", informative(certificate["total"], 1e4, why)))
    if inversion is not None:
        steps, margin = inversion["num_steps"].values(), inversion["decoding_margin"]
        why = f"larger than {margin:.2g}, half the distance of two symbols"
        bound = informative(inversion["error_bound"], margin, why)
        times = [inversion[f"seconds_{k}"] for k in ("inverse", "inverse_coarse")]
        whole, coarse = (t / inversion["seconds_forward"] for t in times)
        lines += [
            ("proof", proof(inversion)),
            ("reconstruction error", f"{inversion['reconstruction_error']:.2e}"),
            ("error bound by the rounding model", bound),
            ("distance of two symbols", f"at least {2 * margin:.2e}"),
            ("solver steps per layer", f"{min(steps)}–{max(steps)}"),
            (
                "inverse costs",
                f"{whole:.1f} forward passes in {inversion['dtype']}, "
                f"{coarse:.1f} to float32's accuracy (by the clock)",
            ),
        ]
    return lines


def certificate_sentences(certificate: Mapping[str, Any] | None) -> list[str]:
    """The certificate in words, and what it does not say."""
    if certificate is None:
        return ["Nothing: this is a baseline without a Lipschitz bound."]
    causal = certificate["kind"] == "causal"
    constant = "diagonal block of the Jacobian" if causal else "Lipschitz constant"
    weighted = "a learned weighted " if certificate["conditions"] else "the "
    bound = f"{largest_bound(certificate)} in {weighted}{certificate['norm']} norm"
    return [
        f"The {constant} of every residual branch is proven to be at most {bound} "
        f"(target {certificate['target']}), for sequences of "
        f"up to {certificate['seq_len']} tokens and weights in {certificate['dtype']}. The stack "
        "between embedding and final LayerNorm can therefore be inverted by fixed-point iteration.",
        "The certificate says nothing about the LayerNorm and head above the stack, and no small "
        "constant of the whole network follows from it.",
    ]


def comparison(reports: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Several evaluations as a table: a header, then a row for each."""
    header = ["", "model", "step", "bpc", "5-gram", "every branch ≤", "largest estimate"]
    rows = [[*header, "recovered", "proven", "characters/s"]]
    for name, report in zip(names_of(reports), reports, strict=True):
        certificate, inversion, ngram = (report[k] for k in ("certificate", "inversion", "ngram"))
        worst = worst_constants(report)
        cells = [
            f"{report['bpc']:.4f}",
            f"{ngram['bpc']:.4f}" if ngram else "–",
            largest_bound(certificate) if certificate else "–",
            f"{worst['estimate']:.4f}" if worst else "–",
            *(shares(inversion) if inversion else "––"),
            f"{report['perf']['forward_characters_per_second']:,.0f}",
        ]
        rows.append([name, report["model"]["name"], str(report["step"]), *cells])
    return rows


def print_comparison(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print :func:`comparison`, numbers to the right, and whether the texts differ."""
    rows = comparison(reports)
    print()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), *list(cells)[2:]]))
    if texts_differ(reports):
        print(DIFFERING)


def texts_differ(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the evaluations are of different texts, or count different units."""
    return (
        len({(r["data"]["sha256"], r["data"]["split"], r["num_characters"]) for r in reports}) > 1
    )


def certified_first(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The norms with the constants measured in each, that of the certificate first."""
    measured, certificate = report["local_lipschitz"], report["certificate"] or {}
    norms = ("diagonal_block", certificate.get("norm", ""), *measured)
    return [(norm, measured[norm]) for norm in dict.fromkeys(norms) if norm in measured]


def largest_bound(certificate: Mapping[str, Any], digits: int = 6) -> str:
    """The largest bound on a branch, rounded upwards."""
    return upwards(max(certificate["per_branch"].values()), digits)


def largest_proven(certificate: Mapping[str, Any], digits: int = 6) -> str:
    """The largest bound with its norm and target, on one line."""
    norm, target = certified_norm(certificate), certificate["target"]
    return f"≤ {largest_bound(certificate, digits)} in {norm} (target {target})"


def certified_norm(certificate: Mapping[str, Any]) -> str:
    """The norm that a certificate speaks of, and whether of diagonal blocks alone."""
    diagonal = "" if certificate["kind"] == "global" else ", diagonal blocks of the Jacobian"
    return name_of_norm(certificate["norm"], certificate) + diagonal


def title_of(run: str, model: str, text: str, certificate: Mapping[str, Any] | None) -> str:
    """What a picture of a run shows."""
    norm = "token_max" if certificate is None else certified_norm(certificate)
    return f"{run}: {model} on {text}. Lipschitz constants in {norm}"


def name_of_norm(norm: str, certificate: Mapping[str, Any] | None) -> str:
    """The norm, and whether it is weighted by learned scalings of the channels."""
    return f"weighted {norm}" if certificate and certificate["conditions"] else norm


def shares(inversion: Mapping[str, Any]) -> list[str]:
    """The shares of characters that were recovered and proven, rounded downwards."""
    found = (inversion[f"characters_{what}"] for what in ("recovered", "proven"))
    return [f"{downwards(share, 4):.2%}" for share in found]


def names_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for every evaluation: the run's folder, or the path if that is not unique."""
    paths = [Path(report["checkpoint"]) for report in reports]
    runs = [
        path.parents[1].name if path.parent.name == CHECKPOINTS else path.name for path in paths
    ]
    return runs if len(set(runs)) == len(runs) else [str(path) for path in paths]


def summary_values(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation on the run's own text, for its W&B summary."""
    certificate, inversion, ngram = (report[k] for k in ("certificate", "inversion", "ngram"))
    values = {f"{report['data']['split']}_bpc": report["bpc"], **worst_constants(report)}
    if ngram:
        values["ngram_bpc"] = ngram["bpc"]
    if certificate:
        values["certified"] = max(certificate["per_branch"].values())
    if inversion:
        values |= {k: inversion[k] for k in ("characters_recovered", "characters_proven")}
    return {f"evaluation/{key}": value for key, value in values.items()}


def branch_constants(report: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The four constants of every branch, in the certificate's norm if that was measured."""
    rows = next((rows for _, rows in certified_first(report)), {})
    targets = (report["certificate"] or {}).get("targets", {})
    return {name: {**row, "target": targets.get(name)} for name, row in rows.items()}


def worst_constants(report: Mapping[str, Any]) -> dict[str, float]:
    """The largest of each over all branches."""
    rows = branch_constants(report).values()
    keys = ("estimate", "local_bound", "bound", "target")
    known = {key: [v for row in rows if (v := row[key]) is not None] for key in keys}
    return {key: max(values) for key, values in known.items() if values}


def informative(value: float, limit: float, why: str) -> str:
    """A number and, from a limit on, the reason why it says nothing."""
    return f"{value:.2e}" if value < limit else f"{value:.2e}, not informative: {why}"


def proof(inversion: Mapping[str, Any]) -> str:
    """By which numbers the characters are proven, or are not."""
    count = inversion["num_characters"]
    if inversion["unproven"] is not None:
        return f"none: {inversion['unproven']}"
    numbers = (
        f"least margin {inversion['margin']:.3g}, after an arithmetic error of at most "
        f"{inversion['arithmetic_error']:.2g}"
    )
    if not inversion["radius"] > inversion["distance"]:  # NaN is no radius
        away = f"the states of this text are up to {inversion['distance']:.2g} away"
        return f"not of every character: {numbers}; {away}"
    radius = shortened_down(inversion["radius"])
    others = "any other symbols"
    if inversion.get("characters_tried", count) < count:
        others += " where they were tried"
    return f"{others} have a state farther than {radius} from the given one ({numbers})"
