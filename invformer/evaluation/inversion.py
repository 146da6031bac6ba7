"""From the top of the stack back to the text."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.nn.branch import frozen_weights
from invformer.nn.certificate import Certificate, certify, invertible_stack
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.fixed_point import InversionStatus
from invformer.numerics.norms import vector_norm
from invformer.numerics.precision import unit_roundoff
from invformer.numerics.residual_equation import rtol_of_single_precision

Method = Literal["auto", "picard", "anderson"]


@dataclass(frozen=True)
class InversionReport:
    """A text round trip: tokens → features → tokens.

    Attributes:
        residual: largest ‖y − x̂ − f(x̂)‖ over samples and layers, in the stack's norm.
        error_bound: largest bound on ‖x̂ − x‖ at the embedding, forward rounding included (by the
            rounding model of docs/numerics.md); inf if nothing is proven.
        reconstruction_error: largest measured ‖x̂ − x‖ at the embedding, in the same norm.
        decoding_margin: half the least distance between embeddings, in the stack's norm.
        preimage_bound: largest distance, at the embedding, of the decoded text from any other text
            with the same output, by :meth:`.InvertibleStack.preimage_bound`. Below twice the
            decoding margin there is none.
        num_steps: largest number of iterations per layer.
        num_evaluations: the same of evaluations of its branch, measurement included.
        converged_fraction: share of (sample, layer) pairs that converged.
        characters_recovered: share of characters that came back as they were.
        characters_certified: share of characters that are proven to be those that went up: the
            error bound is below the decoding margin, or no other text has this output.
        num_characters: how many characters were inverted.
        dtype: arithmetic of forward pass and iteration.
        method: fixed-point solver.
        seconds_forward: wall time of a forward pass of the stack, the median of three in turns;
            None if that was not asked for.
        seconds_inverse: the same of the inversion.
        seconds_inverse_bare: the same without its evidence; None in float64, where it is no less.
        seconds_inverse_coarse: in float64 the same, evidence included, to the relative error that
            float32 is asked for (:func:`.residual_equation.rtol_of_single_precision`); else None.
    """

    residual: float
    error_bound: float
    reconstruction_error: float
    decoding_margin: float
    preimage_bound: float
    num_steps: dict[str, int]
    num_evaluations: dict[str, int]
    converged_fraction: float
    characters_recovered: float
    characters_certified: float
    num_characters: int
    dtype: str
    method: str
    seconds_forward: float | None
    seconds_inverse: float | None
    seconds_inverse_bare: float | None
    seconds_inverse_coarse: float | None


@torch.no_grad()
def invert_text(
    model: CharTransformer,
    tokens: Integer[Tensor, "sequences tokens"],
    certificate: Certificate,
    *,
    dtype: torch.dtype = torch.float32,
    method: Method = "auto",
    atol: float | None = None,
    max_steps: int = 500,
    timed: bool = False,
) -> tuple[Integer[Tensor, "sequences tokens"], InversionReport]:
    """Push a text up the stack, bring it back down, and compare.

    Args:
        model: a model with an invertible stack, in eval mode.
        tokens: the text.
        certificate: proven constants of that stack; the error bounds rest on them.
        dtype: arithmetic of forward pass and iteration.
        method: fixed-point solver.
        atol: error allowed per layer, on top of the relative one that follows dtype and constant;
            None allows none.
        max_steps: iterations allowed per layer.
        timed: invert three times more to see what that costs; below float64 without evidence too,
            in float64 to the accuracy of float32 too.

    Returns:
        The decoded tokens and the report. Nothing is raised for samples that did not converge: the
        report says how many.
    """
    stack = invertible_stack(model)
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
        stack = invertible_stack(model)
    if certificate.dtype != str(dtype).removeprefix("torch."):
        certificate = certify(stack, dtype=dtype)  # for the weights as they are used here
    x = model.embedding(tokens)
    z = stack(x)
    options: dict[str, Any] = {"method": method, "max_steps": max_steps, "throw": False}
    if atol is not None:
        options["atol"] = atol
    with frozen_weights(stack):
        solution = stack.inverse(z, certificate, **options)
        seconds: dict[str, float] = {}
        if timed:
            variant: dict[str, Any] = {"evidence": False}
            name = "bare"
            if dtype == torch.float64:
                variant = {"rtol": rtol_of_single_precision(certificate.bound_max)}
                name = "coarse"
            seconds = in_turns(
                {
                    "forward": lambda: stack(x),
                    "inverse": lambda: stack.inverse(z, certificate, **options),
                    name: lambda: stack.inverse(z, certificate, **options, **variant),
                }
            )
    decoded = model.embedding.nearest_tokens(solution.value)
    margin = model.embedding.decoding_margin(stack.norm)
    again = model.embedding(decoded)
    apart = stack.preimage_bound(again, z, of_single_tokens(stack, certificate, dtype))
    # Embeddings are sums of two parts, rounded.
    rounded = 4 * unit_roundoff(dtype) * vector_norm(again.double(), stack.norm)
    proven = (solution.error_bound < margin) | (apart + rounded < 2 * margin)
    layers = solution.layers
    converged = torch.stack([s.status == InversionStatus.CONVERGED for s in layers.values()])
    error = vector_norm((solution.value - x).double(), stack.norm)
    report = InversionReport(
        residual=max(s.residual.max().item() for s in layers.values()),
        error_bound=solution.error_bound.max().item(),
        reconstruction_error=error.max().item(),
        decoding_margin=margin,
        preimage_bound=apart.max().item(),
        num_steps={name: int(s.num_steps.max()) for name, s in layers.items()},
        num_evaluations={name: int(s.num_evaluations.max()) for name, s in layers.items()},
        converged_fraction=converged.double().mean().item(),
        characters_recovered=(decoded == tokens).double().mean().item(),
        characters_certified=proven.double().mean().item(),
        num_characters=tokens.numel(),
        dtype=str(dtype).removeprefix("torch."),
        method=method,
        seconds_forward=seconds.get("forward"),
        seconds_inverse=seconds.get("inverse"),
        seconds_inverse_bare=seconds.get("bare"),
        seconds_inverse_coarse=seconds.get("coarse"),
    )
    return decoded, report


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


def of_single_tokens(
    stack: InvertibleStack, certificate: Certificate, dtype: torch.dtype
) -> Certificate:
    """What is proven of the diagonal blocks: enough to tell texts apart, and less than constants.

    They are known in the Euclidean norm of one token, so in token_max and in no other norm.
    """
    if certificate.kind == "causal" or stack.norm != "token_max":
        return certificate
    return certify(stack, dtype=dtype, kind="causal")
