"""Which characters of a text are proven by the states at the top of a causal network.

For a causal network F, a text x̂ and a position i let

    m_i = min over symbols v ≠ x̂_i of ‖F(x̂_{<i}, v)_i − F(x̂)_i‖₂,   δ_i = ‖F(x̂)_i − z_i‖₂.

A text whose states lie within m_j − δ_j of the states z_j for all j ≤ i begins with x̂_1 … x̂_i
(docs/numerics.md §19). If it is known how far z may be off, more is proven: a text whose states
are so near to it begins with x̂_1 … x̂_i if no other symbol has such a state at a j ≤ i. Both take
forward passes alone, of every symbol at every position, and an enclosure of the rounding of each
(:mod:`invformer.proofs.enclosed_network`). F is the network of real numbers with the weights
that its forward pass multiplies by.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from invformer.branches.enclosed import NotEnclosed
from invformer.nn.transformer import CharTransformer
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.precision import changed, without_autocast
from invformer.numerics.threads import threads
from invformer.proofs.enclosed_network import Network
from invformer.proofs.nearby_network import NearbyNetwork

# Symbols that are pushed up at once: their activations stay in a processor's cache.
ROWS = 256
# Symbols whose distances are known before those near the least one are bounded accurately.
CANDIDATES = 16 * ROWS
# How many times an arithmetic error goes into a margin, or numbers get more digits.
ENOUGH = 16


@dataclass(frozen=True)
class MarginEvidence:
    """What states prove about texts, or about the beginning of one text, per character."""

    # Proven lower bound on m_i, arithmetic error included.
    margin: Float[Tensor, "*sequences tokens"]
    # Largest bound on the error of a computed state of this position, ‖·‖₂, among those that may
    # be nearest to the text's or fit.
    arithmetic_error: Float[Tensor, "*sequences tokens"]
    # Proven upper bound on δ_i, the distance of the text's exact states from those given.
    distance: Float[Tensor, "*sequences tokens"]
    # min over j ≤ i of margin_j − distance_j.
    radius: Float[Tensor, "*sequences tokens"]
    # Whether 2 distance_j < margin_j for all j ≤ i. Where another text differs first, its state is
    # then farther from that given than this text's. If it is known how far the states may be off:
    # whether no other text may have such states up to i. Never for the unknown symbol, which stands
    # for many characters.
    proven: Bool[Tensor, "*sequences tokens"]
    # The text.
    tokens: Integer[Tensor, "*sequences tokens"]
    # Why nothing is proven, where the rounding of a network is not bounded.
    unproven: str | None = None


Watch = Callable[[MarginEvidence], object]


class Networks:
    """A model as proofs compute it, for texts of up to ``length`` tokens; its weights stay."""

    def __init__(self, model: CharTransformer, length: int) -> None:
        self.in_enclosures = cache(partial(Network, model, length))  # by whether it is accurate

    @cached_property
    def nearby(self) -> NearbyNetwork | None:
        """The fast one, or None if a branch has no formulas for it."""
        network = self.in_enclosures(False)
        return NearbyNetwork(network) if NearbyNetwork.is_possible(network) else None


@torch.no_grad()
def prefix_margins(
    model: CharTransformer | Networks,
    tokens: Integer[Tensor, "sequences tokens"],
    states: Float[Tensor, "sequences tokens width"],
    unknown: int | None = 0,
    *,
    fit: bool = False,
    entries_within: Float[Tensor, "..."] | float | None = None,
    states_within: Float[Tensor, "..."] | float | None = None,
    watch: Watch = lambda evidence: None,
) -> MarginEvidence:
    """Prove a text by the states at the top of a stack.

    Cost: a forward pass of every symbol at every position in float64. Symbols that may be nearest
    are bounded again, number by number; all are if there are no formulas for whole rows, which
    takes five times as long. Where the arithmetic error is more than a small part of the margin,
    numbers are sums of two float64, which takes four times as long again.

    Args:
        model: any model; where its rounding is not bounded, nothing is proven. For many texts its
            :class:`Networks`, which are built once then.
        tokens: the text, as decoded from the states.
        states: the states at the top of the stack, in front of its LayerNorm, in any precision.
        unknown: the symbol that stands for every character outside the vocabulary.
        fit: first replace symbols, from the first position on, by those whose states fit best.
            Where the rounding of a model is not bounded, ``tokens`` stay as they are.
        entries_within: how far each entry of the given states may be off: half the step of a
            rounding, with room for that of the forward pass; inf where it is lost. A number, or of
            a shape that can be expanded to that of ``states``.
        states_within: how far each state may be off, ‖·‖₂, as for ``tokens``.
        watch: gets the evidence about ever longer beginnings of a text, one text after the other.
            What it raises ends the proof, and what it was given stays proven.
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
        with changed(*precision, "highest"), without_autocast(tokens.device), threads() as each:
            networks = model
            if not isinstance(networks, Networks):
                networks = Networks(networks, tokens.shape[-1])
            given = zip(tokens, states, entries, lengths, strict=True)
            options = fit, is_known, unknown, watch, each
            texts = [evidence_of(networks, *text, *options) for text in given]
    except NotEnclosed as error:
        nan = torch.full(tokens.shape, math.nan, dtype=torch.float64, device=tokens.device)
        nothing = torch.zeros_like(tokens).bool()
        return MarginEvidence(nan, nan, nan, nan, nothing, tokens, str(error))
    stacked: Any = map(torch.stack, zip(*texts, strict=True))
    return MarginEvidence(*stacked)


def as_double(bound: Tensor | float, like: Tensor) -> Tensor:
    """A bound of each entry of a tensor, in float64."""
    return torch.as_tensor(bound).to(like.device, torch.float64).expand_as(like)


def evidence_of(
    networks: Networks,
    tokens: Integer[Tensor, "tokens"],
    states: Float[Tensor, "tokens width"],
    entries: Float[Tensor, "tokens width"],
    lengths: Float[Tensor, "tokens"],
    fit: bool,
    is_known: bool,
    unknown: int | None,
    watch: Watch,
    each: Callable[..., Iterator[Any]],
) -> tuple[Any, ...]:
    """The tensors of :class:`MarginEvidence` about one text.

    The accurate network is used at positions where an error is more than a sixteenth of its margin.
    """
    num_symbols, device = len(networks.in_enclosures(False).symbols.middle), tokens.device
    everywhere, symbols = (torch.arange(n, device=device) for n in (len(tokens), num_symbols))
    # The text's states by each network, and what is kept of them.
    pushed: dict[Any, tuple[Any, list[Any]]] = {}
    nearby = networks.nearby
    at_once = ROWS if nearby is None else CANDIDATES
    few = max(1, ROWS // num_symbols)

    def text(network: Network) -> tuple[Enclosure, list[Any]]:
        if network not in pushed:
            pushed[network] = network(tokens, everywhere, None)
        return pushed[network]

    def at(places: Tensor, accurate: bool) -> tuple[Tensor, ...]:
        """Margin, error, distance, and whether no other symbol may have a state as given."""
        nonlocal tokens, nearby, at_once
        network = networks.in_enclosures(accurate)
        while True:  # a symbol that is replaced may change what fits best after it
            own, past = text(network)
            compare = partial(distances, each, own, states, entries, lengths)
            where = torch.stack(torch.meshgrid(places, symbols, indexing="ij")).flatten(1)
            is_own = tokens[places, None] == symbols
            if nearby is None:
                compared = compare(network, past, where).unflatten(-1, is_own.shape)
            else:
                compared = compare(nearby, nearby.remembered(past), where)
                compared = compared.unflatten(-1, is_own.shape)
                margin, error, excess, _ = compared
                least = (margin + 2 * error).masked_fill(is_own, math.inf).amin(-1, keepdim=True)
                near = ~((margin > least) & (excess > 0))  # or NaN
                if near.double().mean() > 0.5:
                    if not accurate:
                        return at(places, accurate=True)
                    nearby, at_once = None, ROWS
                error.zero_()
                compared[:3, near] = compare(network, past, where[:, near.flatten()])[:3]
            best = compared[3].argmin(-1)
            wrong = best != tokens[places]
            if not (fit and wrong.any()):
                break
            at_once = ROWS
            if (fits := int(wrong.int().argmax())) > few:
                places, is_own, compared = places[:fits], is_own[:fits], compared[:, :fits]
                break
            places = places[:few]
            tokens = tokens.index_copy(0, places, best[: len(places)])
            pushed.clear()
        margin, error, excess, _ = compared
        margin = margin.masked_fill(is_own, math.inf)
        if not (accurate or bool((ENOUGH * error <= margin).all())):
            return at(places, accurate=True)
        distance = (own[places] - constant(states[places])).single().norm_at_most()
        alone = ((excess > 0) != is_own).all(-1)
        return margin.amin(-1), error.amax(-1), distance, alone

    found: list[tuple[Tensor, ...]] = []
    evidence: tuple[Any, ...] = ()
    while (first := sum(len(each[0]) for each in found)) < len(tokens):
        places = everywhere[first : first + max(1, at_once // num_symbols)]
        found.append(at(places, accurate=False))
        margin, error, distance, alone = map(torch.cat, zip(*found, strict=True))
        told_apart = alone if is_known else (2 * distance < margin) & margin.isfinite()
        beginning = tokens[: len(margin)]
        proven = told_apart.cumprod(-1).bool() & (beginning != unknown)
        evidence = margin, error, distance, (margin - distance).cummin(0).values, proven, beginning
        watch(MarginEvidence(*evidence))
    return evidence


def distances(
    each: Callable[..., Iterator[Any]],
    own: Enclosure,
    states: Float[Tensor, "tokens width"],
    entries: Float[Tensor, "tokens width"],
    lengths: Float[Tensor, "tokens"],
    network: Network | NearbyNetwork,
    past: list[Any],
    where: Integer[Tensor, "2 rows"],
) -> Float[Tensor, "4 rows"]:
    """Symbols at some places: the state of each beside that of the text, and beside that given.

    A lower bound on the first distance, the error in it, a lower bound on how much farther than
    ``entries`` or ``lengths`` allow it is from the state given, and the same by midpoints, which
    chooses symbols and proves nothing.
    """

    def of(at: Integer[Tensor, "rows"], symbol: Integer[Tensor, "rows"]) -> Tensor:
        state, _ = network(symbol, at, past)
        margin, error = (state - own[at]).single().norm_at_least()
        off = (state - constant(states[at])).single()
        excess = [
            torch.maximum((x.at_least() - entries[at]).amax(-1), x.norm_at_least()[0] - lengths[at])
            for x in (off, off.exact())
        ]
        return torch.stack([margin, error, *excess])

    return torch.cat([*each(of, *(part.split(ROWS) for part in where))], -1)
