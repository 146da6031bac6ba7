"""From the top of the stack back to the text."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.evaluation.prefix_margins import MarginEvidence, prefix_margins
from invformer.nn.certificate import Certificate, certify, invertible_stack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.fixed_point import rtol_of_single_precision
from invformer.numerics.norms import vector_norm


@dataclass(frozen=True)
class InversionReport:
    """A text round trip: tokens → states → tokens.

    Attributes:
        residual: largest ‖y − x̂ − f(x̂)‖ over samples and layers, in the stack's norm.
        error_bound: largest bound on ‖x̂ − x‖ at the embedding, by the rounding model of
            docs/numerics.md; inf if there is none.
        reconstruction_error: largest measured ‖x̂ − x‖ at the embedding, in the same norm.
        decoding_margin: half the least distance between embeddings, in the stack's norm.
        num_steps: largest number of iterations per layer.
        num_evaluations: the same of evaluations of its branch, measurement included.
        converged_fraction: share of (sample, layer) pairs that converged.
        characters_recovered: share of characters that came back as they were.
        characters_proven: share of characters that :func:`.prefix_margins` proves from the states;
            None if that was not asked for.
        margin, arithmetic_error, distance, radius: the least margin, the largest arithmetic error
            and distance, and the least radius of any character, as that proof has them.
        proven: whether each character is, one list a sequence.
        unproven: why nothing was proven, if the rounding of this model is not bounded.
        num_characters: how many characters were inverted.
        dtype: arithmetic of forward pass and iteration.
        seconds_proof: wall time of the proof.
        seconds_forward: wall time of a forward pass of the stack, the median of three in turns;
            None if that was not asked for.
        seconds_inverse: the same of the inversion.
        seconds_inverse_coarse: the same to the relative error that float32 is asked for
            (:func:`.fixed_point.rtol_of_single_precision`).
    """

    residual: float
    error_bound: float
    reconstruction_error: float
    decoding_margin: float
    num_steps: dict[str, int]
    num_evaluations: dict[str, int]
    converged_fraction: float
    characters_recovered: float
    characters_proven: float | None
    margin: float | None
    arithmetic_error: float | None
    distance: float | None
    radius: float | None
    proven: list[list[bool]] | None
    unproven: str | None
    num_characters: int
    dtype: str
    seconds_proof: float | None
    seconds_forward: float | None
    seconds_inverse: float | None
    seconds_inverse_coarse: float | None


@torch.no_grad()
def invert_text(
    model: CharTransformer,
    tokens: Integer[Tensor, "sequences tokens"],
    certificate: Certificate,
    *,
    dtype: torch.dtype = torch.float32,
    atol: float | None = None,
    max_steps: int = 500,
    prove: bool = True,
    timed: bool = False,
) -> tuple[Integer[Tensor, "sequences tokens"], InversionReport]:
    """Push a text up the stack, bring it back down, and compare.

    Args:
        model: a model with an invertible stack, in eval mode.
        tokens: the text.
        certificate: proven constants of that stack, for the solver and its error bounds.
        dtype: arithmetic of forward pass and iteration.
        atol: error allowed per layer, on top of the relative one that follows dtype and constant;
            None allows none.
        max_steps: iterations allowed per layer.
        prove: whether to prove what was decoded, which takes a forward pass of every symbol at
            every place.
        timed: invert three times more to see what that costs, also to the accuracy of float32.

    Returns:
        The decoded tokens and the report. Nothing is raised for samples that did not converge: the
        report says how many.

    Raises:
        CertificateViolation: a proven character is not the one that went up.
    """
    stack = invertible_stack(model)
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
        stack = invertible_stack(model)
    if certificate.dtype != str(dtype).removeprefix("torch."):
        certificate = certify(stack, dtype=dtype)  # for the weights as they are used here
    x = model.embedding(tokens)
    weights = stack.weights()
    z = stack(x, weights)
    options: dict[str, Any] = {"max_steps": max_steps, "throw": False}
    if atol is not None:
        options["atol"] = atol
    solution = stack.inverse(z, weights, certificate, **options)
    seconds: dict[str, float] = {}
    if timed:
        coarse = {**options, "rtol": rtol_of_single_precision(certificate.bound_max)}
        seconds = in_turns(
            {
                "forward": lambda: stack(x, weights),
                "inverse": lambda: stack.inverse(z, weights, certificate, **options),
                "coarse": lambda: stack.inverse(z, weights, certificate, **coarse),
            }
        )
    decoded = model.embedding.nearest_tokens(solution.value)
    start = time.perf_counter()
    evidence = prefix_margins(model, decoded, z) if prove else None
    if evidence is not None:
        refuse_wrong_proof(evidence, decoded, tokens)
    layers = solution.layers
    converged = torch.stack([s.converged for s in layers.values()])
    error = vector_norm((solution.value - x).double(), stack.norm)
    report = InversionReport(
        residual=max(s.residual.max().item() for s in layers.values()),
        error_bound=solution.error_bound.max().item(),
        reconstruction_error=error.max().item(),
        decoding_margin=model.embedding.decoding_margin(stack.norm),
        num_steps={name: int(s.num_steps.max()) for name, s in layers.items()},
        num_evaluations={name: int(s.num_evaluations.max()) for name, s in layers.items()},
        converged_fraction=converged.double().mean().item(),
        characters_recovered=(decoded == tokens).double().mean().item(),
        characters_proven=evidence and evidence.proven.double().mean().item(),
        margin=evidence and evidence.margin.min().item(),
        arithmetic_error=evidence and evidence.arithmetic_error.max().item(),
        distance=evidence and evidence.distance.max().item(),
        radius=evidence and evidence.radius.min().item(),
        proven=evidence and evidence.proven.tolist(),
        unproven=evidence and evidence.reason,
        num_characters=tokens.numel(),
        dtype=str(dtype).removeprefix("torch."),
        seconds_proof=evidence and time.perf_counter() - start,
        seconds_forward=seconds.get("forward"),
        seconds_inverse=seconds.get("inverse"),
        seconds_inverse_coarse=seconds.get("coarse"),
    )
    return decoded, report


def refuse_wrong_proof(evidence: MarginEvidence, decoded: Tensor, tokens: Tensor) -> None:
    """Compare proven characters with the text that went up.

    Raises:
        CertificateViolation: one of them is another.
    """
    wrong = (evidence.proven & (decoded != tokens)).nonzero()
    if len(wrong):
        sequence, place = wrong[0].tolist()
        raise CertificateViolation(
            f"{len(wrong)} proven characters are not those of the text, the first is character "
            f"{place} of sequence {sequence}: the forward pass that made the states errs by more "
            f"than half the margin of {evidence.margin[sequence, place]:.3g}, or this is a bug"
        )


def in_turns(work: Mapping[str, Callable[[], Any]], turns: int = 3) -> dict[str, float]:
    """Median seconds of each, one after the other so that a busy machine slows them alike."""
    taken = [{name: seconds_of(each) for name, each in work.items()} for _ in range(turns)]
    return {name: statistics.median(times[name] for times in taken) for name in work}


def seconds_of(work: Callable[[], Any]) -> float:
    """Until the device is done with it."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
