"""From the top of the stack back to the text."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.errors import CertificateViolation
from invformer.nn.certificate import Certificate
from invformer.nn.proof import certify, invertible_stack
from invformer.nn.stack import StackSolution, StackWeights
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.residual_equation import rtol_of_single_precision
from invformer.proofs.prefix_margins import MarginEvidence, Watch, prefix_margins

Text = Integer[Tensor, "sequences tokens"]
States = Float[Tensor, "sequences tokens width"]


@dataclass(frozen=True)
class RoundTrip:
    """A text that went up the stack of a model and came back: tokens → states → tokens."""

    model: CharTransformer  # in the arithmetic of forward pass and iteration
    weights: StackWeights
    certificate: Certificate  # of these weights
    tokens: Text
    embedded: States
    states: States  # at the top of the stack
    solution: StackSolution  # samples that did not converge are counted, not refused
    decoded: Text  # the tokens nearest to it

    def numbers(self) -> dict[str, Any]:
        """How far the text came back: largest over samples, lengths in the stack's norm.

        ``error_bound`` is on ‖x̂ − x‖ at the embedding, by the rounding model of docs/numerics.md,
        inf if there is none; ``reconstruction_error`` the same as measured; ``decoding_margin``
        half the least distance between embeddings.
        """
        norm, layers = invertible_stack(self.model).norm, self.solution.layers
        converged = torch.stack([s.converged for s in layers.values()])
        error = vector_norm((self.solution.value - self.embedded).double(), norm)
        return {
            "residual": max(s.residual.max().item() for s in layers.values()),
            "error_bound": self.solution.error_bound.max().item(),
            "reconstruction_error": error.max().item(),
            "decoding_margin": self.model.embedding.decoding_margin(norm),
            "num_steps": {name: int(s.num_steps.max()) for name, s in layers.items()},
            "num_evaluations": {name: int(s.num_evaluations.max()) for name, s in layers.items()},
            "converged_fraction": converged.double().mean().item(),
            "characters_recovered": (self.decoded == self.tokens).double().mean().item(),
            "num_characters": self.tokens.numel(),
            "dtype": self.certificate.dtype,
        }

    def proof(
        self, count: int | None = None, watch: Watch = lambda evidence: None
    ) -> MarginEvidence:
        """Prove characters by the states; takes a forward pass of every symbol at every place.

        Of each text it looks at the first ``count`` characters, or at all.

        Raises:
            CertificateViolation: a proven character is not the one that went up.
        """
        decoded, tokens = self.decoded[:, :count], self.tokens[:, :count]
        evidence = prefix_margins(self.model, decoded, self.states[:, :count], watch=watch)
        wrong = (evidence.proven & (decoded != tokens)).nonzero()
        if len(wrong):
            sequence, place = wrong[0].tolist()
            raise CertificateViolation(
                f"{len(wrong)} proven characters are not those of the text, the first is character "
                f"{place} of sequence {sequence}: the forward pass that made the states errs by "
                f"more than half the margin of {evidence.margin[sequence, place]:.3g}, or this is "
                "a bug"
            )
        return evidence

    @torch.no_grad()
    def seconds(self) -> dict[str, float]:
        """Wall time of a forward pass of the stack and of an inversion, medians of three in turns.

        ``inverse_coarse`` is an inversion to the relative error that float32 is asked for
        (:func:`.rtol_of_single_precision`).
        """
        stack = invertible_stack(self.model)
        rtol = rtol_of_single_precision(self.certificate.bound_max)
        known = self.states, self.weights, self.certificate
        inverse = partial(stack.inverse, *known, throw=False)
        return in_turns(
            {
                "forward": lambda: stack(self.embedded, self.weights),
                "inverse": inverse,
                "inverse_coarse": partial(inverse, rtol=rtol),
            }
        )


@torch.no_grad()
def round_trip(model: CharTransformer, tokens: Text, dtype: torch.dtype) -> RoundTrip:
    """Push a text up an invertible stack in eval mode and bring it back down, both in ``dtype``."""
    if next(model.parameters()).dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    stack = invertible_stack(model)
    x, weights = model.embedding(tokens), stack.weights()
    certificate = certify(stack, weights=weights)
    z = stack(x, weights)
    solution = stack.inverse(z, weights, certificate, throw=False)
    decoded = model.embedding.nearest_tokens(solution.value)
    return RoundTrip(model, weights, certificate, tokens, x, z, solution, decoded)


def in_turns(work: Mapping[str, Callable[[], Any]], turns: int = 3) -> dict[str, float]:
    """Median seconds of each, one after the other so that a busy machine slows them alike."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    for name, each in [*work.items()] * turns:
        wait()
        start = time.perf_counter()
        each()
        wait()  # until the device is done with it
        taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}
