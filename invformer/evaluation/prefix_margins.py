"""Which characters of a text are proven by the states at the top of a causal network.

For a causal network F, a text x̂ and a position i let

    m_i = min over symbols v ≠ x̂_i of ‖F(x̂_{<i}, v)_i − F(x̂)_i‖₂,   δ_i = ‖F(x̂)_i − z_i‖₂.

A text whose states lie within m_j − δ_j of the states z_j for all j ≤ i begins with x̂_1 … x̂_i
(docs/numerics.md §19). If it is known how far z may be off, more is proven: a text whose states
are so near to it begins with x̂_1 … x̂_i if no other symbol has such a state at a j ≤ i. Both take
forward passes alone, of every symbol at every position, and an enclosure of the rounding
of each (:mod:`invformer.evaluation.enclosed_network`). F is the network
of real numbers with the weights that its forward pass multiplies by.
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
from invformer.numerics.enclosure import constant
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
    # The symbols whose states, behind those before them in the text, fit those given best.
    best: Integer[Tensor, "sequences tokens"]
    # Why nothing is proven, where the rounding of a network is not bounded.
    unproven: str | None = None


@torch.no_grad()
def prefix_margins(
    model: CharTransformer,
    tokens: Integer[Tensor, "sequences tokens"],
    states: Float[Tensor, "sequences tokens width"],
    unknown: int | None = 0,
    entries_within: Float[Tensor, "#sequences #tokens #width"] | None = None,
    states_within: Float[Tensor, "#sequences #tokens"] | None = None,
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
        entries_within: how far each entry of the given states may be off: half the step of a
            rounding, with room for that of the forward pass; inf where it is lost.
        states_within: how far each state may be off, ‖·‖₂.
    """
    is_known = entries_within is not None or states_within is not None
    anywhere, unit = states.new_tensor(math.inf), states.new_ones(())
    entries = (anywhere if entries_within is None else entries_within).expand_as(states)
    if states_within is None:
        states_within = anywhere if is_known else unit
    lengths = states_within.expand(tokens.shape)
    # Products in the formats of their factors: no autocast, no TF32 or bfloat16 for float32.
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    try:
        with changed(*precision, "highest"), without_autocast(tokens.device):
            network = Network(model, tokens.shape[-1], accurate=False)
            found = []
            for text in zip(tokens, states, entries, lengths, strict=True):
                evidence = evidence_of(network, *text)
                if evidence is None:
                    network = Network(model, tokens.shape[-1])  # also for the texts that follow
                    evidence = evidence_of(network, *text)
                found.append(evidence)
    except NotEnclosed as error:
        nan = torch.full(tokens.shape, math.nan, dtype=torch.float64, device=tokens.device)
        nothing = torch.zeros_like(tokens).bool()
        return MarginEvidence(nan, nan, nan, nan, nothing, tokens, str(error))
    margin, arithmetic_error, distance, radius, alone, best = (
        torch.stack(numbers) for numbers in zip(*found, strict=True)
    )
    told_apart = alone if is_known else (2 * distance < margin) & margin.isfinite()
    proven = told_apart.cumprod(-1).bool() & (tokens != unknown)
    return MarginEvidence(margin, arithmetic_error, distance, radius, proven, best)


def fitted(
    model: CharTransformer,
    tokens: Integer[Tensor, "sequences tokens"],
    states: Float[Tensor, "sequences tokens width"],
    **known: Any,
) -> tuple[Integer[Tensor, "sequences tokens"], MarginEvidence]:
    """The text found from damaged states by trying every symbol, and what is proven of it.

    All positions at once take the symbol that fits best, until none changes: the i-th is final
    after i rounds at most, and after few where ``tokens`` is nearly right. The arguments are those
    of :func:`prefix_margins`; where nothing is proven, ``tokens`` stay as they are.
    """
    evidence = prefix_margins(model, tokens, states, **known)
    for _ in range(tokens.shape[-1]):
        if torch.equal(evidence.best, tokens):
            break
        tokens = evidence.best
        evidence = prefix_margins(model, tokens, states, **known)
    return tokens, evidence


def evidence_of(
    network: Network,
    tokens: Integer[Tensor, "tokens"],
    states: Float[Tensor, "tokens width"],
    entries: Float[Tensor, "tokens width"],
    lengths: Float[Tensor, "tokens"],
) -> tuple[Tensor, ...] | None:
    """Margin, arithmetic error, distance and radius of every character of one text.

    And whether it alone may have a state within ``entries`` and ``lengths`` of the one given, and
    the symbol whose state is nearest in these units. None if the numbers are float64's own and that
    is not enough: an error is more than a sixteenth of its margin.
    """
    length, symbols = len(tokens), len(network.symbols.middle)
    own, past = network(tokens, torch.arange(length, device=tokens.device), None)
    distance = (own - constant(states)).single().norm_at_most()
    margins, errors, misfits = [], [], []
    for rows in torch.arange(length * symbols, device=tokens.device).split(ROWS):
        places, symbol = rows // symbols, rows % symbols
        state, _ = network(symbol, places, past)
        margin, error = (state - own[places]).single().norm_at_least()
        margins.append(margin.masked_fill(symbol == tokens[places], math.inf))
        errors.append(error)
        off = (state - constant(states[places])).single()
        of_entries = (off.at_least() / entries[places]).amax(-1)
        misfits.append(torch.maximum(of_entries, off.norm_at_least()[0] / lengths[places]))
        if not network.accurate and not bool((ENOUGH * error <= margins[-1]).all()):
            return None
    margin = torch.cat(margins).view(length, symbols).amin(-1)
    error = torch.cat(errors).view(length, symbols).amax(-1)
    misfit = torch.cat(misfits).view(length, symbols)
    is_own = tokens[:, None] == torch.arange(symbols, device=tokens.device)
    alone = ((misfit > 1) != is_own).all(-1)
    return margin, error, distance, (margin - distance).cummin(0).values, alone, misfit.argmin(-1)
