"""Small certified models: matrices in few bits, normalised after they were rounded.

Matrices are rounded as ``export.py bits=…`` rounds them, so the certificate is proven for the bits
that are shipped. Vectors stay in float32; they and the scales count in the size.

Verdict: the certificate holds at every number of bits, and at int8 and int4 every character of the
certified model is recovered and proven, for at most 0.05 bits per character.
"""

import copy
import math
from dataclasses import dataclass

import torch

from invformer.config.section import option
from invformer.data.windows import EvaluationWindows
from invformer.evaluation.likelihood import score
from invformer.nn.proof import enforce
from invformer.nn.transformer import CharTransformer
from invformer.proofs.prefix_margins import prefix_margins
from invformer.runs.packed import BITS
from invformer.trained.quantised import quantised
from studies.report import Figure, Finding, Rows, Summary, curves, panels, table, values
from studies.states import decode, kind_of, trained, undoing, validation, windows
from studies.study import Study, StudyOptions, grid, program


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Round the weights of trained models."""

    models: list[str] = option([], "run folders: certified, coupling or dot-product models")
    bits: list[int] = option([32, 8, 4, 3], "of a matrix entry; more than 8 leave it", "[2, 32]")
    num_windows: int = option(4, "windows that are inverted and proven", "[1, 1e4]")
    scored: int | None = option(None, "characters scored; null is the whole split", "[1e3, 1e9]")


@dataclass(frozen=True)
class Case:
    """One model in some bits."""

    model: str
    bits: int
    num_windows: int
    scored: int | None
    seed: int


@dataclass(frozen=True)
class Result:
    """Size, loss, certificate, and the text back."""

    name: str
    size: float  # KiB
    bpc: float
    bound: float | None  # largest proven constant of a branch
    target: float | None
    recovered: float  # by the inverse; by search for a dot product
    proven: float


def cases(options: Options) -> list[Case]:
    """Every model in every number of bits."""
    return grid(Case, options, model=options.models, bits=options.bits)


def in_bits(model: CharTransformer, bits: int) -> tuple[CharTransformer, float]:
    """The model in float32 with rounded matrices, in eval mode, and its size in KiB."""
    model, matrices = quantised(model, bits) if bits in BITS else (copy.deepcopy(model), {})
    model.float().eval()
    whole = sum(4 * p.numel() for name, p in model.named_parameters() if name not in matrices)
    few = sum(m.integers.numel() * bits / 8 + 2 * m.scale.numel() for m in matrices.values())
    return model, (whole + few) / 1024


@torch.no_grad()
def measure(case: Case, device: torch.device) -> Result:
    """Round, certify, score, invert and prove."""
    source, tokens = trained(case.model), windows(case.model, case.num_windows)
    name, target = kind_of(source.network), source.config.model.lipschitz_target
    model, size = in_bits(source.network, case.bits)
    bound = enforce(model, dtype=torch.float32).bound_max if model.is_invertible else None
    text = validation(case.model)[: case.scored]
    likelihood = score(model, EvaluationWindows(text, model.seq_len, model.seq_len, 64), device)
    model.double()
    z = model.stack(model.embedding(tokens))
    if name == "twin":
        found = decode(model, z, None).tokens
    else:
        found = model.embedding.nearest_tokens(undoing(model)(z))
    return Result(
        name=name,
        size=size,
        bpc=likelihood.nats / math.log(2),
        bound=bound,
        target=target if bound is not None else None,
        recovered=(found == tokens).double().mean().item(),
        proven=prefix_margins(model, found, z).proven.double().mean().item(),
    )


def summarise(rows: Rows[Case, Result]) -> Summary:
    """What every number of bits loses, and whether the certificate holds there."""
    largest = max(values(rows, "bits"))
    whole = {r.name: r.bpc for c, r in rows if c.bits == largest}

    def lost(case: Case, result: Result) -> float:
        return result.bpc - whole[result.name]

    findings: list[Finding] = []
    for case, r in rows:
        words = f"{r.name}, {case.bits} bits: {lost(case, r):+.4f} bpc"
        if r.bound is None or r.target is None:
            findings.append((None, words))
            continue
        back = case.bits < 4 or (r.recovered == r.proven == 1 and lost(case, r) <= 0.05)
        findings.append((r.bound <= r.target and back, f"{words}, {r.proven:.1%} proven"))
    return Summary(table(rows, more={"lost": lost}), findings)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Bits per character against size."""
    figure, (axes,) = panels(1, 1)
    curves(axes, rows, lambda case, result: round(result.size), "bpc", ("name",))
    for case, result in rows:
        at = (result.size, result.bpc)
        axes.annotate(f"{case.bits} bits", at, (6, 6), textcoords="offset points", fontsize=8)
    axes.set(xlabel="size, KiB", ylabel="bits per character", xscale="log")
    axes.margins(x=0.1)  # room for the words beside the last point
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
