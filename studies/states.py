"""Trained models whose states are studied: their text, damage, and one position at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

import invformer
from invformer.branches.dot_product import DotProductAttention
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.data.corpora import read_corpus
from invformer.errors import ConfigurationError
from invformer.nn.coupling import CouplingBlock, CouplingStack
from invformer.nn.proof import certify
from invformer.nn.residual import InvertibleResidual
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.ball import into_ball
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.trained.model import TrainedModel

MOST_STEPS = 200  # of a fixed point at one position
OUTSIDE = 1e6  # more than any distance of two states
MORE = 4  # times as many candidates, if none of those tried can be the true one
SLACK = 1e-9  # more than what float64 rounds in a state


@lru_cache(maxsize=4)
def trained(folder: str) -> TrainedModel:
    """The model of a run folder, in float64."""
    model = invformer.load(folder, "cpu")
    model.network.double()
    return model


def kind_of(model: CharTransformer) -> str:
    """What docs/what-for.md calls such a model."""
    if isinstance(model.stack, CouplingStack):
        return "coupling"
    return "certified" if model.is_invertible else "twin"


@lru_cache(maxsize=4)
def validation(folder: str) -> Integer[Tensor, " characters"]:
    """The validation split of the model's own text."""
    model = trained(folder)
    return model.vocabulary.encode(read_corpus(model.config.data).split("val"))


@lru_cache(maxsize=4)
def windows(folder: str, count: int) -> Integer[Tensor, "windows tokens"]:
    """Windows spread evenly over the validation split."""
    seq_len = trained(folder).network.seq_len
    whole = validation(folder).long().unfold(0, seq_len, seq_len)
    return whole[torch.linspace(0, len(whole) - 1, count).long()]


def undoing(model: CharTransformer, throw: bool = False) -> Callable[[Tensor], Tensor]:
    """z ↦ x of all positions at once, with everything that does not depend on z computed before.

    ``throw`` raises where a fixed point was not reached.

    Raises:
        ConfigurationError: the model has no inverse.
    """
    stack = model.stack
    if isinstance(stack, CouplingStack):
        return stack.inverse
    if not isinstance(stack, InvertibleStack):
        raise ConfigurationError("models: a dot-product model has no inverse; leave it out")
    weights, certificate = stack.weights(), certify(model)
    return lambda z: stack.inverse(z, weights, certificate, throw=throw, evidence=False).value


class Prefix:
    """Texts that are known up to a position, and the states of what may come next.

    Every attention keeps the keys and values of the known symbols, so that a candidate for the next
    position costs one token's pass through the stack, however many candidates there are.

    The model has strictly causal attention in the unit ball, or is a dot-product baseline or a
    coupling; feed-forwards see one token. ``length`` symbols are known, and branches have been
    evaluated for ``branch_rows`` tokens.
    """

    def __init__(self, model: CharTransformer, num_texts: int) -> None:
        self.model, self.length, self.branch_rows = model, 0, 0
        self.weights = model.weights()
        self.num_texts = num_texts
        self.past: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.latest: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return self.model.head.out_features

    @property
    def passes(self) -> float:
        """``branch_rows`` in forward passes of one token."""
        return self.branch_rows / (2 * len(self.model.stack.blocks))

    def embed(self, symbols: Integer[Tensor, "texts candidates"]) -> Tensor:
        """The stack's input for candidates of the next symbol."""
        embedding = self.model.embedding
        return self.pad(embedding.token(symbols) + embedding.position[self.length])

    def pad(self, e: Float[Tensor, "*rows embedded"]) -> Float[Tensor, "*rows width"]:
        """With the zero channels that the embedding does not write to."""
        return nn.functional.pad(e, (0, self.model.embedding.padding))

    def states(self, x: Float[Tensor, "texts candidates width"]) -> Tensor:
        """The top states of candidates for the next position, given as the stack's input."""
        return self.model.through_stack(x, self.branch, self.weights)

    def append(self, symbols: Integer[Tensor, "texts"]) -> None:
        """Take the next symbol of every text as known."""
        self.states(self.embed(symbols[:, None]))
        for branch, new in self.latest.items():
            for kept, tensor in zip(self._kept(branch, *new), new, strict=True):
                kept[:, :, self.first(branch) + self.length] = tensor[:, :, 0]
        self.length += 1

    def preimage(self, z: Float[Tensor, "texts 1 width"], rtol: float = 1e-6) -> Tensor:
        """The stack's input at the next position whose top state is z, behind the known symbols."""
        stack = self.model.stack
        if isinstance(stack, CouplingStack):
            for block in reversed(list[nn.Module](stack.blocks)):
                assert isinstance(block, CouplingBlock)
                z = block.inverse(z, self.branch)
            return z
        assert isinstance(stack, InvertibleStack)
        assert self.weights is not None
        for name, layer in reversed(list(stack.layers())):
            w = self.weights[name]
            if not isinstance(layer, InvertibleResidual):
                z = w.undo(z)
                continue
            v = w.scale_input(z)
            u = v
            for _ in range(MOST_STEPS):
                previous, u = u, v - self.branch(layer, u, w)
                if bool(((u - previous).norm(dim=-1) <= rtol * u.norm(dim=-1)).all()):
                    break
            z = u if w.scaling is None else w.scaling.undo(u)
        return z

    def branch(self, layer: Any, x: Tensor, of_layer: Any = None) -> Tensor:
        """The branch of one layer for every candidate behind the known symbols."""
        self.branch_rows += x.shape[0] * x.shape[1]
        weights = None if of_layer is None else of_layer.branch
        if weights is None:
            branch, x = layer.inner, layer.norm(x)
        else:
            branch, x = layer.branch, into_ball(x, layer.input_radius)
        if isinstance(branch, BoundedAttention):
            assert weights is not None
            q, k, v = branch.in_ball(x, weights)
            q = q * weights.temperature[:, None, None]
            y = self.attend(branch, q, k, v, not branch.strictly_causal)
            return y @ weights.g.flatten(-3, -2)
        if isinstance(branch, DotProductAttention):
            q, k, v = (split_heads(t, branch.num_heads) for t in branch.qkv(x).chunk(3, dim=-1))
            return branch.out(self.attend(branch, q / q.shape[-1] ** 0.5, k, v, True))
        return branch(x) if weights is None else branch(x, weights)

    def attend(self, branch: Any, q: Tensor, k: Tensor, v: Tensor, own: bool) -> Tensor:
        """softmax over the known symbols, and the candidate's own where it sees itself."""
        self.latest[branch] = k, v
        keys, values = (
            t[:, :, : self.first(branch) + self.length] for t in self._kept(branch, k, v)
        )
        bias = branch.position.last_rows(1, self.length + 1).to(q)
        logits = q @ keys.mT
        if not own:
            return merge_heads((logits + bias).softmax(-1) @ values)
        to_itself = (q * k).sum(-1, keepdim=True)
        p = (torch.cat([logits, to_itself], -1) + bias).softmax(-1)
        return merge_heads(p[..., :-1] @ values + p[..., -1:] * v)

    def _kept(self, branch: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of known symbols; strictly causal ones come a token later, first zero."""
        if branch not in self.past:
            size = self.model.seq_len + 1
            like = (t.new_zeros(self.num_texts, t.shape[1], size, t.shape[-1]) for t in (k, v))
            self.past[branch] = next(like), next(like)
        return self.past[branch]

    @staticmethod
    def first(branch: nn.Module) -> int:
        """Rows before the first symbol: the zero that strictly causal attention begins with."""
        return int(getattr(branch, "strictly_causal", False))


@dataclass(frozen=True)
class Decoded:
    """Texts decoded from states."""

    tokens: Integer[Tensor, "texts tokens"]
    passes: float  # forward passes of one token that it took


@torch.no_grad()
def decode(
    model: CharTransformer,
    z: Float[Tensor, "texts tokens width"],
    num_candidates: int | None,
    within: Float[Tensor, "texts #tokens #width"] | None = None,
) -> Decoded:
    """Position by position, the symbol whose state behind those decoded fits z best.

    Args:
        num_candidates: only so many symbols are tried: those nearest to the preimage of the
            position, then those that :func:`predicted` puts first; more if none of them has a
            state ``within`` these bounds. None tries all.
        within: how far the entries of the true states may be from those of z, which tells more than
            their distance does; inf where they are lost.
    """
    prefix, found = Prefix(model, len(z)), []
    for place in range(z.shape[1]):
        target = z[:, place : place + 1]
        of_place = None if within is None else within[:, min(place, within.shape[1] - 1), None]
        symbols = torch.arange(prefix.vocab_size).expand(len(z), -1)
        scores = z.new_zeros(symbols.shape)
        if num_candidates is not None:
            apart = (prefix.embed(symbols) - prefix.preimage(target)).norm(dim=-1)
            near = smallest(apart, num_candidates)
            start = near.gather(1, misfit(prefix, near, target, of_place).argmin(1, True))
            scores = predicted(prefix, start, target)
            symbols = smallest(scores, num_candidates)
        misfits = misfit(prefix, symbols, target, of_place)
        while symbols.shape[1] < prefix.vocab_size and bool((misfits.amin(1) >= OUTSIDE).any()):
            symbols = smallest(scores, MORE * symbols.shape[1])  # the true symbol is none of them
            misfits = misfit(prefix, symbols, target, of_place)
        found.append(symbols.gather(1, misfits.argmin(1, True))[:, 0])
        prefix.append(found[-1])
    return Decoded(torch.stack(found, 1), prefix.passes)


def smallest(scores: Float[Tensor, "texts vocab"], count: int) -> Integer[Tensor, "texts count"]:
    """The symbols with the smallest scores."""
    return scores.topk(min(count, scores.shape[-1]), largest=False).indices


def misfit(
    prefix: Prefix,
    symbols: Integer[Tensor, "texts candidates"],
    target: Tensor,
    within: Tensor | None,
) -> Float[Tensor, "texts candidates"]:
    """‖F(v) − z‖₂ of each candidate; at least OUTSIDE if an entry is not ``within`` its bound."""
    apart = prefix.states(prefix.embed(symbols)) - target
    if within is None:
        return apart.norm(dim=-1)
    outside = (apart.abs() / within).amax(-1)
    length = apart.masked_fill(within.isinf(), 0.0).norm(dim=-1)  # of what is not lost
    return torch.where(outside <= 1, length, OUTSIDE * outside)


def predicted(
    prefix: Prefix, start: Integer[Tensor, "texts 1"], target: Tensor, step: float = 1e-4
) -> Float[Tensor, "texts vocab"]:
    """‖F(e) + J (e_v − e) − z‖² for every symbol v: the state made linear at the embedding e.

    J comes from one pass per channel of the embedding, whatever the number of symbols.
    """
    table = prefix.model.embedding.token.weight
    e = prefix.embed(start)
    moves = step * torch.eye(e.shape[-1], dtype=e.dtype)[: table.shape[1]]
    at, *moved = prefix.states(torch.cat([e, e + moves], 1)).split([1, len(moves)], 1)
    columns = (moved[0] - at) / step  # Jᵀ, (texts, d_embedding, width)
    away = table - table[start]  # (texts, vocab, d_embedding)
    residual = at - target
    gram = columns @ columns.mT
    slope = columns @ residual.mT
    return (away @ gram * away).sum(-1) + 2 * (away @ slope)[..., 0]
