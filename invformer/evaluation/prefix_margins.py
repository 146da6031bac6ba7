"""Which characters of a text are proven by the states at the top of a causal network.

For a causal network F, a text x̂ and a position i let

    m_i = min over symbols v ≠ x̂_i of ‖F(x̂_{<i}, v)_i − F(x̂)_i‖₂,   δ_i = ‖F(x̂)_i − z_i‖₂.

A text whose states lie within m_j − δ_j of the states z_j for all j ≤ i begins with x̂_1 … x̂_i
(docs/numerics.md §19). If it is known how far z may be off, more is proven: a text whose states
are so near to it begins with x̂_1 … x̂_i if no other symbol has such a state at a j ≤ i. Both take
forward passes alone, of every symbol at every position, and an enclosure of the rounding of each
(:mod:`invformer.evaluation.enclosed_network`). F is the network of real numbers with the weights
that its forward pass multiplies by.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from invformer.evaluation.enclosed_branches import NotEnclosed
from invformer.evaluation.enclosed_network import Network
from invformer.nn.transformer import CharTransformer
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.precision import changed, without_autocast

# Symbols that are pushed up at once: their activations stay in a processor's cache.
ROWS = 256
# How many times an arithmetic error goes into a margin, or numbers get more digits.
ENOUGH = 16


@dataclass(frozen=True)
class MarginEvidence:
    """What states prove about a text, per character."""

    # Proven lower bound on m_i, arithmetic error included.
    margin: Float[Tensor, "sequences tokens"]
    # Largest bound on the error of a computed state of this position, ‖·‖₂.
    arithmetic_error: Float[Tensor, "sequences tokens"]
    # Proven upper bound on δ_i, the distance of the text's exact states from those given.
    distance: Float[Tensor, "sequences tokens"]
    # min over j ≤ i of margin_j − distance_j.
    radius: Float[Tensor, "sequences tokens"]
    # Whether 2 distance_j < margin_j for all j ≤ i. Where another text differs first, its state is
    # then farther from that given than this text's. If it is known how far the states may be off:
    # whether no other text may have such states up to i. Never for the unknown symbol, which stands
    # for many characters.
    proven: Bool[Tensor, "sequences tokens"]
    # The text.
    tokens: Integer[Tensor, "sequences tokens"]
    # Why nothing is proven, where the rounding of a network is not bounded.
    unproven: str | None = None


@torch.no_grad()
def prefix_margins(
    model: CharTransformer,
    tokens: Integer[Tensor, "sequences tokens"],
    states: Float[Tensor, "sequences tokens width"],
    unknown: int | None = 0,
    *,
    fit: bool = False,
    entries_within: Float[Tensor, "..."] | float | None = None,
    states_within: Float[Tensor, "..."] | float | None = None,
) -> MarginEvidence:
    """Prove a text by the states at the top of a stack.

    Cost: a forward pass of every symbol at every position, about four times in float64; where its
    arithmetic error is more than a small part of the margin, again in sums of two float64, which
    takes four times as long.

    Args:
        model: any model; where its rounding is not bounded, nothing is proven.
        tokens: the text, as decoded from the states.
        states: the states at the top of the stack, in front of its LayerNorm, in any precision.
        unknown: the symbol that stands for every character outside the vocabulary.
        fit: first replace symbols, from the first position on, by those whose states fit best.
            Where the rounding of a model is not bounded, ``tokens`` stay as they are.
        entries_within: how far each entry of the given states may be off: half the step of a
            rounding, with room for that of the forward pass; inf where it is lost. A number, or of
            a shape that can be expanded to that of ``states``.
        states_within: how far each state may be off, ‖·‖₂, as for ``tokens``.
    """
    is_known = entries_within is not None or states_within is not None
    entries = as_double(math.inf if entries_within is None else entries_within, states)
    if is_known and states_within is None:
        states_within = math.inf
        states = states.masked_fill(entries.isposinf(), 0.0)  # what is lost may hold anything
    lengths = as_double(0.0 if states_within is None else states_within, tokens)
    # Products in the formats of their factors: no autocast, no TF32 or bfloat16 for float32.
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    try:
        with changed(*precision, "highest"), without_autocast(tokens.device):
            network, accurate = Network(model, tokens.shape[-1], accurate=False), None
            found = []
            for text, z, entry, length in zip(tokens, states, entries, lengths, strict=True):
                given = z, entry, length
                evidence, suffices = evidence_of(network, text, *given, fit)
                if not suffices:
                    accurate = accurate or Network(model, tokens.shape[-1])
                    evidence, _ = evidence_of(accurate, evidence[-1], *given, fit)
                found.append(evidence)
    except NotEnclosed as error:
        nan = torch.full(tokens.shape, math.nan, dtype=torch.float64, device=tokens.device)
        nothing = torch.zeros_like(tokens).bool()
        return MarginEvidence(nan, nan, nan, nan, nothing, tokens, str(error))
    margin, arithmetic_error, distance, radius, alone, tokens = (
        torch.stack(numbers) for numbers in zip(*found, strict=True)
    )
    told_apart = alone if is_known else (2 * distance < margin) & margin.isfinite()
    proven = told_apart.cumprod(-1).bool() & (tokens != unknown)
    return MarginEvidence(margin, arithmetic_error, distance, radius, proven, tokens)


def as_double(bound: Tensor | float, like: Tensor) -> Tensor:
    """A bound of each entry of a tensor, in float64."""
    return torch.as_tensor(bound).to(like.device, torch.float64).expand_as(like)


def evidence_of(
    network: Network,
    tokens: Integer[Tensor, "tokens"],
    states: Float[Tensor, "tokens width"],
    entries: Float[Tensor, "tokens width"],
    lengths: Float[Tensor, "tokens"],
    fit: bool,
) -> tuple[tuple[Tensor, ...], bool]:
    """Margin, arithmetic error, distance and radius of every character of one text.

    Then whether it alone may have a state within ``entries`` and ``lengths`` of the one given, and
    the text. All that is followed by whether it suffices: no error is more than a sixteenth of its
    margin. Where it does not, only the last is sure to be there.
    """
    num_symbols, device = len(network.symbols.middle), tokens.device
    everywhere, symbols = (torch.arange(n, device=device) for n in (len(tokens), num_symbols))
    own, past = network(tokens, everywhere, None)
    found, suffices = [], True
    for places in everywhere.split(max(1, ROWS // num_symbols)):
        compared = compare(network, past, own, states, entries, lengths, places)
        for _ in range(len(places) if fit else 0):
            best = compared[-1].argmin(-1)
            if torch.equal(best, tokens[places]):
                break
            tokens = tokens.index_copy(0, places, best)
            own, past = network(tokens, everywhere, None)
            compared = compare(network, past, own, states, entries, lengths, places)
        margin, error, excess, _ = compared
        is_own = tokens[places, None] == symbols
        margin = margin.masked_fill(is_own, math.inf)
        suffices = suffices and bool((ENOUGH * error <= margin).all())
        if not (suffices or fit or network.accurate):
            return (tokens,), False
        alone = ((excess > 0) != is_own).all(-1)
        found.append((margin.amin(-1), error.amax(-1), alone))
    margin, error, alone = (torch.cat(numbers) for numbers in zip(*found, strict=True))
    distance = (own - constant(states)).single().norm_at_most()
    radius = (margin - distance).cummin(0).values
    return (margin, error, distance, radius, alone, tokens), suffices


def compare(
    network: Network,
    past: list[Any],
    own: Enclosure,
    states: Float[Tensor, "tokens width"],
    entries: Float[Tensor, "tokens width"],
    lengths: Float[Tensor, "tokens"],
    places: Integer[Tensor, "places"],
) -> Float[Tensor, "4 places symbols"]:
    """Every symbol at some places: its state beside that of the text, and beside that given.

    A lower bound on the first distance, the error in it, a lower bound on how much farther than
    ``entries`` or ``lengths`` allow it is from the state given, and the same by midpoints, which
    chooses symbols and proves nothing.
    """
    num_symbols, found = len(network.symbols.middle), []
    for rows in torch.arange(len(places) * num_symbols, device=places.device).split(ROWS):
        at, symbol = places[rows // num_symbols], rows % num_symbols
        state, _ = network(symbol, at, past)
        margin, error = (state - own[at]).single().norm_at_least()
        off = (state - constant(states[at])).single()
        excess = [
            torch.maximum(
                (each.at_least() - entries[at]).amax(-1), each.norm_at_least()[0] - lengths[at]
            )
            for each in (off, off.exact())
        ]
        found.append(torch.stack([margin, error, *excess]))
    return torch.cat(found, -1).unflatten(-1, (-1, num_symbols))
