"""An evaluation as a table and in words."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from invformer.evaluation.evaluate import MOSTLY
from invformer.evaluation.inversion import Inversion
from invformer.evaluation.lipschitz import BranchConstants
from invformer.evaluation.result import Evaluation
from invformer.nn.certificate import Certificate
from invformer.numerics.rounding import downwards, shortened_down, upwards
from invformer.runs.checkpoint import CHECKPOINTS

DIFFERING = "the texts or their units differ: bits per character do not compare"


def print_table(report: Evaluation, verbose: bool = False) -> None:
    """Print the result, then details, then one line a branch (``verbose``: in every norm)."""
    data = report.data
    print(f"{report.checkpoint} (step {report.step}) on {data.name}, {data.split}")
    blocks = [columns(headlines(report)), columns(details(report))]
    norms = certified_first(report)
    for norm, rows in norms if verbose else norms[:1]:
        heading = name_of_norm(norm, report.certificate)
        blocks.append([f"  {heading:<24}   estimate ≤ local bound ≤      bound"])
        for name, estimate, local, bound in branch_cells(rows):
            row = rows[name]
            note = "" if row.converged else f"   (residual {row.residual:.1e})"
            line = f"    {name:<24} {estimate:>8}   {local:>11}   {bound:>11}{note}"
            blocks[-1].append(line)
    print("\n\n".join(map("\n".join, blocks)))


def columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in lines)
    return [f"  {name:<{width}}  {value}" for name, value in lines]


def branch_cells(rows: Mapping[str, BranchConstants]) -> list[list[str]]:
    """Name, estimate, local bound and bound of every branch."""
    return [
        [name, f"{row.estimate:.4f}"]
        + ["–" if bound is None else upwards(bound, 4) for bound in (row.local_bound, row.bound)]
        for name, row in rows.items()
    ]


def headlines(report: Evaluation) -> list[tuple[str, str]]:
    """At most six lines that say how good and how certain the model is."""
    certificate, inversion, data, ngram = (
        report.certificate, report.inversion, report.data, report.ngram,
    )  # fmt: skip
    beside = f"  ({ngram.order}-gram: {ngram.bpc:.4f})" if ngram else ""
    lines = [(f"{data.split} bpc", f"{report.bpc:.4f}{beside}")]
    unknown = "unknown to this vocabulary"
    share = f"{data.unknown_rate:.1%} of the text is {unknown}"
    if data.unknown_rate > MOSTLY:
        lines.insert(0, ("mostly unknown", f"{share}, one symbol for all of it"))
    if not data.same_as_training:
        lines.append(("another text", f"{data.name}; {share}"))
    none = ("certificate", "none (not a contractive model)")
    lines.append(("every branch proven", largest_proven(certificate)) if certificate else none)
    if inversion is not None:
        recovered, proven = shares(inversion)
        of_these = inversion.unknown_rate
        more = f"; {of_these:.1%} of these are {unknown}" if of_these else ""
        recovered += f" of the {'symbols' if more else 'characters'} recovered"
        tried, count = inversion.characters_tried, inversion.num_characters
        if tried is not None and tried < count:
            more += f"; the proof tried {tried} of {count} (evaluate.proof_limit)"
        lines.append(("inversion", f"{recovered}, {proven} proven{more}"))
    if measured := report.local_lipschitz.get("token_max"):
        worst, name = max((row.estimate, name) for name, row in measured.items())
        norm = name_of_norm("token_max", certificate)
        lines.append(("largest local estimate", f"{worst:.4f} in {norm} ({name})"))
    return lines


def details(report: Evaluation) -> list[tuple[str, str]]:
    """The numbers behind the headlines."""
    context, certificate, inversion = report.context, report.certificate, report.inversion
    scored, size = report.num_characters, report.data.split_characters
    of_size = "" if scored == size else f" of {size:,}, the first ones,"
    lines = [
        ("nats per character", f"{report.nats:.4f}"),
        ("characters scored", f"{scored:,}{of_size} in {report.precision}"),
        ("context", f"{context.seq_len} characters, stride {context.stride}"),
        ("unknown symbols", f"{report.data.unknown_rate:.2%} of the text"),
    ]
    if certificate is not None and certificate.total is not None:
        why = "a product over all branches and scalings"
        lines.append(("bound on the whole stack", informative(certificate.total, 1e4, why)))
    if inversion is not None:
        steps, margin = inversion.num_steps.values(), inversion.decoding_margin
        why = f"larger than {margin:.2g}, half the distance of two symbols"
        lines += [
            ("proof", proof(inversion)),
            ("reconstruction error", f"{inversion.reconstruction_error:.2e}"),
            (
                "error bound by the rounding model",
                informative(inversion.error_bound, margin, why),
            ),
            ("distance of two symbols", f"at least {2 * margin:.2e}"),
            ("solver steps per layer", f"{min(steps)}–{max(steps)} in {inversion.dtype}"),
        ]
    return lines


def certificate_sentences(certificate: Certificate | None) -> list[str]:
    """The certificate in words, and what it does not say."""
    if certificate is None:
        return ["Nothing: this is a baseline without a Lipschitz bound."]
    causal = certificate.kind == "causal"
    constant = "diagonal block of the Jacobian" if causal else "Lipschitz constant"
    weighted = "a learned weighted " if certificate.conditions else "the "
    bound = f"{upwards(certificate.bound_max, 6)} in {weighted}{certificate.norm} norm"
    return [
        f"The {constant} of every residual branch is proven to be at most {bound} "
        f"(target {certificate.target}), for sequences of "
        f"up to {certificate.seq_len} tokens and weights in {certificate.dtype}. The stack "
        "between embedding and final LayerNorm can therefore be inverted by fixed-point iteration.",
        "The certificate says nothing about the LayerNorm and head above the stack, and no small "
        "constant of the whole network follows from it.",
    ]


def comparison(reports: Sequence[Evaluation]) -> list[list[str]]:
    """Several evaluations as a table: a header, then a row for each."""
    header = ["", "model", "step", "bpc", "5-gram", "every branch ≤", "largest estimate"]
    rows = [[*header, "recovered", "proven"]]
    for name, report in zip(names_of(reports), reports, strict=True):
        certificate, ngram, worst = report.certificate, report.ngram, worst_constants(report)
        cells = [
            f"{report.bpc:.4f}",
            f"{ngram.bpc:.4f}" if ngram else "–",
            upwards(certificate.bound_max, 6) if certificate else "–",
            f"{worst['estimate']:.4f}" if worst else "–",
            *(shares(report.inversion) if report.inversion else "––"),
        ]
        rows.append([name, report.model.name, str(report.step), *cells])
    return rows


def print_comparison(reports: Sequence[Evaluation]) -> None:
    """Print :func:`comparison`, numbers to the right, and whether the texts differ."""
    rows = comparison(reports)
    print()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), *list(cells)[2:]]))
    if texts_differ(reports):
        print(DIFFERING)


def texts_differ(reports: Sequence[Evaluation]) -> bool:
    """Whether the evaluations are of different texts, or count different units."""
    return len({(r.data.sha256, r.data.split, r.num_characters) for r in reports}) > 1


def certified_first(report: Evaluation) -> list[tuple[str, dict[str, BranchConstants]]]:
    """The norms with the constants measured in each, that of the certificate first."""
    measured, certificate = report.local_lipschitz, report.certificate
    norms = ("diagonal_block", certificate.norm if certificate else "", *measured)
    return [(norm, measured[norm]) for norm in dict.fromkeys(norms) if norm in measured]


def largest_proven(certificate: Certificate, digits: int = 6) -> str:
    """The largest bound, rounded upwards, with its norm and target, on one line."""
    bound, norm = upwards(certificate.bound_max, digits), certified_norm(certificate)
    return f"≤ {bound} in {norm} (target {certificate.target})"


def certified_norm(certificate: Certificate) -> str:
    """The norm that a certificate speaks of, and whether of diagonal blocks alone."""
    diagonal = "" if certificate.kind == "global" else ", diagonal blocks of the Jacobian"
    return name_of_norm(certificate.norm, certificate) + diagonal


def title_of(
    run: str, model: str, text: str, unknown_rate: float, certificate: Certificate | None
) -> str:
    """What a picture of a run shows: run, model, text, share of unknown symbols, norm."""
    share = f" ({unknown_rate:.1%} unknown symbols)" if unknown_rate else ""
    norm = "token_max" if certificate is None else certified_norm(certificate)
    return f"{run}: {model} on {text}{share}. Lipschitz constants in {norm}"


def name_of_norm(norm: str, certificate: Certificate | None) -> str:
    """The norm, and whether it is weighted by learned scalings of the channels."""
    return f"weighted {norm}" if certificate and certificate.conditions else norm


def shares(inversion: Inversion) -> list[str]:
    """The shares of characters that were recovered and proven, rounded downwards."""
    found = inversion.characters_recovered, inversion.characters_proven
    return [f"{downwards(share, 4):.2%}" for share in found]


def title_of_report(report: Evaluation) -> str:
    """The same of an evaluation."""
    (run,), data = names_of([report]), report.data
    return title_of(run, report.model.name, data.name, data.unknown_rate, report.certificate)


def names_of(reports: Sequence[Evaluation]) -> list[str]:
    """A short name for every evaluation: the run's folder, or the path if that is not unique."""
    paths = [Path(report.checkpoint) for report in reports]
    runs = [
        path.parents[1].name if path.parent.name == CHECKPOINTS else path.name for path in paths
    ]
    return runs if len(set(runs)) == len(runs) else [str(path) for path in paths]


def summary_values(report: Evaluation) -> dict[str, float]:
    """The numbers of an evaluation on the run's own text, for its W&B summary."""
    values = {f"{report.data.split}_bpc": report.bpc, **worst_constants(report)}
    if report.ngram:
        values["ngram_bpc"] = report.ngram.bpc
    if report.certificate:
        values["certified"] = report.certificate.bound_max
    if found := report.inversion:
        values["characters_recovered"] = found.characters_recovered
        values["characters_proven"] = found.characters_proven
    return {f"evaluation/{key}": value for key, value in values.items()}


def branch_constants(report: Evaluation) -> dict[str, dict[str, float | None]]:
    """The four constants of every branch, in the certificate's norm if that was measured."""
    rows = next((rows for _, rows in certified_first(report)), {})
    targets = report.certificate.targets if report.certificate else {}
    return {
        name: {
            "estimate": row.estimate, "local_bound": row.local_bound, "bound": row.bound,
            "target": targets.get(name),
        }
        for name, row in rows.items()
    }  # fmt: skip


def worst_constants(report: Evaluation) -> dict[str, float]:
    """The largest of each over all branches."""
    rows = branch_constants(report).values()
    keys = ("estimate", "local_bound", "bound", "target")
    known = {key: [v for row in rows if (v := row[key]) is not None] for key in keys}
    return {key: max(values) for key, values in known.items() if values}


def informative(value: float, limit: float, why: str) -> str:
    """A number and, from a limit on, the reason why it says nothing."""
    return f"{value:.2e}" if value < limit else f"{value:.2e}, not informative: {why}"


def proof(inversion: Inversion) -> str:
    """By which numbers the characters are proven, or are not."""
    if inversion.unproven is not None:
        return f"none: {inversion.unproven}"
    numbers = (
        f"least margin {inversion.margin:.3g}, after an arithmetic error of at most "
        f"{inversion.arithmetic_error:.2g}"
    )
    if not inversion.radius > inversion.distance:  # NaN is no radius
        away = f"the states of this text are up to {inversion.distance:.2g} away"
        return f"not of every character: {numbers}; {away}"
    others, tried = "any other symbols", inversion.characters_tried
    if tried is not None and tried < inversion.num_characters:
        others += " where they were tried"
    radius = shortened_down(inversion.radius)
    return f"{others} have a state farther than {radius} from the given one ({numbers})"
