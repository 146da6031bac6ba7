"""From the top of the stack back to the text."""

import copy
from dataclasses import dataclass
from functools import partial
from itertools import starmap

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.data.tokens import unknown_rate
from invformer.data.vocabulary import Vocabulary
from invformer.errors import CertificateViolation
from invformer.evaluation.marked_text import MarkedText, marks, readable
from invformer.nn.certificate import Certificate
from invformer.nn.proof import certify, invertible_stack
from invformer.nn.stack import StackSolution, StackWeights
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.processes.bar import Bar
from invformer.proofs.prefix_margins import MarginEvidence, Watch, prefix_margins

Text = Integer[Tensor, "sequences tokens"]
States = Float[Tensor, "sequences tokens width"]


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """How far texts came back: largest over samples, lengths in the stack's norm."""

    residual: float  # of any layer
    error_bound: float  # on ‖x̂ − x‖ at the embedding, by docs/numerics.md; inf if there is none
    reconstruction_error: float  # ‖x̂ − x‖ as measured
    decoding_margin: float  # half the least distance between embeddings
    num_steps: dict[str, int]  # of the solver, by layer
    num_evaluations: dict[str, int]
    converged_fraction: float
    characters_recovered: float  # share
    num_characters: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Inversion(Reconstruction):
    """The same, with what is proven: :class:`.MarginEvidence`, and the texts."""

    characters_proven: float  # share
    characters_tried: int | None = None  # by the proof; None if a file of 0.1 does not say
    margin: float  # the least
    arithmetic_error: float  # the largest
    distance: float  # the largest, from the states of the text to those given
    radius: float  # the least: other symbols have a state farther away
    unproven: str | None  # why nothing is proven
    texts: list[MarkedText]
    unknown_rate: float  # share of the characters that are the unknown symbol


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

    def reconstruction(self) -> "Reconstruction":
        """How far the text came back."""
        norm, layers = invertible_stack(self.model).norm, self.solution.layers
        converged = torch.stack([s.converged for s in layers.values()])
        error = vector_norm((self.solution.value - self.embedded).double(), norm)
        return Reconstruction(
            residual=max(s.residual.max().item() for s in layers.values()),
            error_bound=self.solution.error_bound.max().item(),
            reconstruction_error=error.max().item(),
            decoding_margin=self.model.embedding.decoding_margin(norm),
            num_steps={name: int(s.num_steps.max()) for name, s in layers.items()},
            num_evaluations={name: int(s.num_evaluations.max()) for name, s in layers.items()},
            converged_fraction=converged.double().mean().item(),
            characters_recovered=(self.decoded == self.tokens).double().mean().item(),
            num_characters=self.tokens.numel(),
            dtype=self.certificate.dtype,
        )

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


def inverted(
    model: CharTransformer,
    vocabulary: Vocabulary,
    tokens: Text,
    dtype: torch.dtype,
    proof_limit: int,
) -> Inversion:
    """Round trip of some sequences, each text beside the recovered one with what is proven.

    The proof tries the first characters of each, at most ``proof_limit`` characters times symbols.
    """
    with Bar(desc="inversion"):
        trip = round_trip(model, tokens, dtype)
    of_each = proof_limit // (len(tokens) * vocabulary.size)
    count, before = min(max(1, of_each), tokens.shape[-1]), 0
    with Bar(desc="proof", total=count * len(tokens), unit="characters") as bar:

        def watch(evidence: MarginEvidence) -> None:
            nonlocal before
            now = len(evidence.tokens)
            bar.update(now - before if before < count else now)
            before = now

        proof = trip.proof(count, watch)
    proven = torch.zeros_like(trip.decoded).bool()
    proven[:, :count] = proof.proven
    decoded = ([vocabulary.decode(t) for t in batch.cpu()] for batch in (tokens, trip.decoded))
    symbols = zip(*decoded, proven.tolist(), strict=True)
    texts = starmap(partial(readable, vocabulary), symbols)
    return Inversion(
        **vars(trip.reconstruction()),
        characters_proven=proven.double().mean().item(),
        characters_tried=proof.proven.numel(),
        margin=proof.margin.min().item(),
        arithmetic_error=proof.arithmetic_error.max().item(),
        distance=proof.distance.max().item(),
        radius=proof.radius.min().item(),
        unproven=proof.unproven,
        texts=[MarkedText(text or "", found, marks(text, found, ok)) for text, found, ok in texts],
        unknown_rate=unknown_rate(tokens),
    )
